// Package streamq has workers and loaders for a streamq gateway. It uses the standard library only.
package streamq

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"
)

// Calls wait for up to 50 s at the gateway. Without an answer for so long, the connection is dead.
const silence = 75 * time.Second

const (
	longestPause = 5 * time.Second
	// After an outage a worker that holds parts has to be heard within about a lease.
	reportPause = 1500 * time.Millisecond
)

// Gateway makes calls of a gateway. A call that gets no answer is made again, word for word: to the
// gateway it is the same call, so nothing is lost and nothing is counted twice.
type Gateway struct {
	URL string
	Key string
	// Client may be set, for certificates of your own. Its connections are kept open.
	Client *http.Client
}

// FromEnv returns the gateway that STREAMQ_GATEWAY and STREAMQ_KEY name.
func FromEnv() *Gateway {
	url := os.Getenv("STREAMQ_GATEWAY")
	if url == "" {
		url = "http://127.0.0.1:8470"
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.MaxIdleConnsPerHost = 1000 // one for each slot
	return &Gateway{URL: strings.TrimRight(url, "/"), Key: os.Getenv("STREAMQ_KEY"),
		Client: &http.Client{Transport: transport}}
}

// Refusal is the error of a call that the gateway refused. Code is a word to act on, such as EXISTS.
type Refusal struct {
	Status int    `json:"status"`
	Code   string `json:"code"`
	Detail string `json:"detail"`
}

func (r *Refusal) Error() string { return fmt.Sprintf("%d %s: %s", r.Status, r.Code, r.Detail) }

// Call makes a call and decodes the answer into "into", unless there is none. It is repeated until
// the gateway answers or the context ends.
func (g *Gateway) Call(ctx context.Context, method, path string, body, into any) error {
	return g.Do(ctx, method, path, body, func(r io.Reader) error {
		data, err := io.ReadAll(r)
		if err != nil || len(data) == 0 || into == nil {
			return err
		}
		return json.Unmarshal(data, into)
	})
}

// Do is Call with a function of your own that reads the answer. If it returns an error, the call is
// made again.
func (g *Gateway) Do(ctx context.Context, method, path string, body any, read func(io.Reader) error) error {
	var said []byte
	if body != nil {
		var err error
		if said, err = json.Marshal(body); err != nil {
			return err
		}
	}
	longest := longestPause
	if path == "/v1/report" {
		longest = reportPause
	}
	for tries := 0; ; tries++ {
		after, err := g.try(ctx, method, path, said, read)
		if err == nil {
			return nil
		}
		if refusal, is := err.(*Refusal); is && !isNotNow(refusal.Status) {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause(tries, longest, after)):
		}
	}
}

func (g *Gateway) try(ctx context.Context, method, path string, said []byte, read func(io.Reader) error) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, silence)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, method, g.URL+path, bytes.NewReader(said))
	if err != nil {
		return "", &Refusal{Status: 400, Code: "URL", Detail: err.Error()}
	}
	request.Header.Set("Content-Type", "application/json")
	if g.Key != "" {
		request.Header.Set("Authorization", "Bearer "+g.Key)
	}
	response, err := g.Client.Do(request)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	if response.StatusCode < 300 {
		return "", read(response.Body)
	}
	refusal := &Refusal{}
	json.NewDecoder(io.LimitReader(response.Body, 1<<20)).Decode(refusal) // a proxy may say anything
	refusal.Status = response.StatusCode
	return response.Header.Get("Retry-After"), refusal
}

// isNotNow tells whether an answer means that the gateway or its server is away, full, or asked too
// often.
func isNotNow(status int) bool {
	switch status {
	case 408, 429, 502, 503, 504, 507:
		return true
	}
	return false
}

// pause returns how long to wait. Pauses grow, and a part of each is random, so that a fleet does
// not come back all at once.
func pause(tries int, longest time.Duration, after string) time.Duration {
	grown := longest
	if tries < 6 && 100*time.Millisecond<<tries < longest {
		grown = 100 * time.Millisecond << tries
	}
	if seconds, err := strconv.Atoi(after); err == nil && time.Duration(seconds)*time.Second > grown {
		grown = time.Duration(seconds) * time.Second
	}
	return time.Duration(float64(grown) * (0.75 + rand.Float64()/2))
}
