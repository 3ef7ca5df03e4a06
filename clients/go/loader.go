package streamq

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"unicode/utf8"
)

// What one call carries, at most.
const (
	chunkParts = 500
	chunkBytes = 1 << 20
)

// Request says what to make. Options are those of POST /v1/requests: "limit", "level", "retries" ...
type Request struct {
	ID      string
	Handler string
	Queue   string
	Options map[string]any
}

// Status is where a request stands.
type Status struct {
	ID    string
	State string
	Parts struct{ Total, Waiting, Running, Retry, Done, Failed int64 }
}

// IsLive tells whether parts of the request may still run.
func (s Status) IsLive() bool { return s.State == "loading" || s.State == "open" }

// Submit sends payloads as a request, each as one part: strings and bytes as they are, anything else
// as JSON. "next" returns them one by one, and io.EOF at the end. Parts run while later ones are
// still being sent. The same call again after a crash goes on where the first one ended, if the
// payloads are the same.
func (g *Gateway) Submit(ctx context.Context, request Request, next func() (any, error)) (Status, error) {
	var status Status
	said := object{"id": request.ID, "handler": request.Handler, "state": "loading"}
	for name, value := range request.Options {
		said[name] = value
	}
	if request.Queue != "" {
		said["queue"] = request.Queue
	}
	if err := g.Call(ctx, "POST", "/v1/requests", said, &status); err != nil || status.State != "loading" {
		return status, err
	}
	path := "/v1/requests/" + url.PathEscape(request.ID)
	there, total, size := status.Parts.Total, int64(0), 0
	var parts []any
	send := func() error {
		if len(parts) == 0 {
			return nil
		}
		first := total - int64(len(parts)) + 1
		err := g.Call(ctx, "POST", path+"/parts", object{"first": first, "parts": parts}, nil)
		parts, size = nil, 0
		return err
	}
	for {
		payload, err := next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return status, err
		}
		part, err := json.Marshal(form(payload))
		if err != nil {
			return status, err
		}
		if len(parts) == chunkParts || size+len(part) > chunkBytes {
			if err := send(); err != nil {
				return status, err
			}
		}
		total++
		if total > there {
			parts, size = append(parts, json.RawMessage(part)), size+len(part)
		}
	}
	if err := send(); err != nil {
		return status, err
	}
	err := g.Call(ctx, "POST", path+"/seal", object{"total": total}, &status)
	return status, err
}

func form(payload any) any {
	switch v := payload.(type) {
	case string:
		if utf8.ValidString(v) {
			return object{"text": v}
		}
		return object{"base64": []byte(v)}
	case []byte:
		return object{"base64": v}
	}
	return payload
}

// Wait returns the status of a request when it has ended.
func (g *Gateway) Wait(ctx context.Context, id string) (Status, error) {
	for {
		var status Status
		err := g.Call(ctx, "GET", "/v1/requests/"+url.PathEscape(id)+"/wait?wait_s=25", nil, &status)
		if err != nil || !status.IsLive() {
			return status, err
		}
	}
}

// Result is what became of a part. Text has a result that is text, JSON any other value.
type Result struct {
	Part   int64
	Result *struct {
		JSON                json.RawMessage
		Text, Base64, Lines *string
	}
}

// String returns a result as a line shows it.
func (r Result) String() string {
	switch v := r.Result; {
	case v == nil:
		return "null"
	case v.Text != nil:
		return *v.Text
	case v.Lines != nil:
		return *v.Lines
	case v.Base64 != nil:
		return string(payload(nil, nil, v.Base64))
	default:
		return string(v.JSON)
	}
}

// Results calls "each" with results in input order, as they come, until the request has ended. Parts
// that failed have no result.
func (g *Gateway) Results(ctx context.Context, id string, each func(Result) error) error {
	from, over := int64(1), false
	var stopped error
	for !over && stopped == nil {
		path := fmt.Sprintf("/v1/requests/%s/results?follow=1&from=%d", url.PathEscape(id), from)
		err := g.Do(ctx, "GET", path, nil, func(body io.Reader) error {
			lines := bufio.NewReader(body)
			for {
				line, err := lines.ReadBytes('\n')
				if err != nil {
					return nil // the connection broke, or all was said: go on from there
				}
				var said struct {
					Result
					Next   int64
					IsOver bool `json:"is_over"`
				}
				if err := json.Unmarshal(line, &said); err != nil {
					return err
				}
				if over = said.IsOver; said.Part > 0 {
					from = said.Part + 1
					stopped = each(said.Result)
				} else {
					from = said.Next
				}
				if over || stopped != nil {
					return nil
				}
			}
		})
		if err != nil {
			return err
		}
	}
	return stopped
}
