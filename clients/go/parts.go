package streamq

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"os"
	"runtime/debug"
	"time"
	"unicode/utf8"
)

// runPart runs one part and returns its result as the gateway wants it, and the trace of a panic.
func (w *Worker) runPart(ctx context.Context, now *granted, part Part, alone bool) (result json.RawMessage, trace string, err error) {
	if alone {
		w.alone.Lock()
		defer w.alone.Unlock()
	} else {
		w.alone.RLock()
		defer w.alone.RUnlock()
	}
	if now.TimeoutMs > 0 {
		limited, cancel := context.WithTimeout(ctx, time.Duration(now.TimeoutMs)*time.Millisecond)
		defer cancel()
		ctx = limited
	}
	defer func() {
		if panicked := recover(); panicked != nil {
			err, trace = fmt.Errorf("panic: %v", panicked), string(debug.Stack())
		}
	}()
	value, err := w.Handlers[now.Handler](ctx, part)
	if err != nil {
		return nil, "", err
	}
	result, err = encode(value)
	return result, "", err
}

// beat says every second that this worker lives and what it runs, and stops what nobody wants any more.
func (w *Worker) beat(ctx context.Context) {
	for ticker := time.NewTicker(beatEvery); ; {
		select {
		case <-ctx.Done():
			ticker.Stop()
			return
		case <-ticker.C:
		}
		tickets := []object{}
		w.held.Range(func(ticket, mine any) bool {
			said := object{"ticket": ticket}
			if part := mine.(*holding).part.Load(); part > 0 {
				said["part"] = part
			}
			tickets = append(tickets, said)
			return true
		})
		if len(tickets) == 0 {
			continue
		}
		var verdict struct{ Unwanted []string }
		// If no beat comes through, the leases end, and others run the parts.
		short, cancel := context.WithTimeout(ctx, 2*beatEvery)
		w.Gateway.Call(short, "POST", "/v1/beat", object{"tickets": tickets}, &verdict)
		cancel()
		for _, ticket := range verdict.Unwanted {
			if mine, found := w.held.Load(ticket); found {
				mine.(*holding).cancel()
			}
		}
	}
}

func (w *Worker) ask(waitS int) object {
	names := []string{}
	for name := range w.Handlers {
		names = append(names, name)
	}
	queue, most := w.Queue, w.Most
	if queue == "" {
		queue = "default"
	}
	if most < 1 || most > 400 { // a report may tell of 400 failures
		most = 200
	}
	host, _ := os.Hostname()
	name := fmt.Sprintf("%.50s.%d", host, os.Getpid())
	return object{"queue": queue, "handlers": names, "most": most, "wait_s": waitS, "lease_s": leaseS, "name": name, "slots": w.slots()}
}

func payload(value json.RawMessage, text, encoded *string) []byte {
	switch {
	case text != nil:
		return []byte(*text)
	case encoded != nil:
		data, _ := base64.StdEncoding.DecodeString(*encoded) // the gateway encoded it
		return data
	}
	return value
}

func encode(value any) (json.RawMessage, error) {
	var result json.RawMessage
	var err error
	switch v := value.(type) {
	case nil:
		return json.RawMessage("null"), nil
	case string:
		if utf8.ValidString(v) {
			result, err = json.Marshal(object{"text": v})
		} else {
			result, err = json.Marshal(object{"base64": []byte(v)})
		}
	case []byte:
		result, err = json.Marshal(object{"base64": v})
	default:
		result, err = json.Marshal(object{"json": v})
	}
	if err == nil && len(result) > 2*mostResult {
		err = &Failure{Kind: "abandon", Message: fmt.Sprintf("a result has %d bytes", len(result))}
	}
	return result, err
}

func failure(part int64, err error, trace string) object {
	said := object{"part": part, "error": fmt.Sprintf("%.200T", err), "message": err.Error(), "traceback": trace}
	if told, is := err.(*Failure); is {
		said["kind"] = told.Kind
		if told.After > 0 {
			said["after_ms"] = told.After.Milliseconds()
		}
	}
	return said
}

func (w *Worker) slots() int { return max(1, w.Slots) }

func max(a, b int) int {
	if a > b {
		return a
	}
	return b
}
