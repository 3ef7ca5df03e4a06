package streamq

import (
	"context"
	"encoding/json"
	"errors"
	"log"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// A lease stands so long after the last beat. If this process dies, its parts run elsewhere 9 s later.
	leaseS    = 4
	beatEvery = time.Second
	grace     = 20 * time.Second
	// A body may have 16 MiB, and a result 4 MiB. A report goes out when it has this many bytes.
	full       = 8 << 20
	mostResult = 4 << 20
)

// Part is what a handler gets. Payload has the bytes of a text, and the JSON of any other value.
type Part struct {
	Request string
	Number  int64
	Attempt int
	Payload []byte
}

// Handler runs a part. Its result is a string, bytes, nil, or what becomes JSON. After an error the
// part is run again, unless the error is a *Failure that says otherwise. The context ends when
// nobody wants the result any more, or when the time limit of the request is over.
type Handler func(ctx context.Context, part Part) (any, error)

// Failure is an error with its consequence: "retry", "snooze" (no attempt is spent), "hold" (the
// whole request waits) or "abandon" (the part is given up).
type Failure struct {
	Kind    string
	After   time.Duration
	Message string
}

func (f *Failure) Error() string { return f.Message }

// Worker takes parts, runs them, and reports what became of them.
type Worker struct {
	Gateway  *Gateway
	Queue    string
	Handlers map[string]Handler
	Slots    int // parts that run at the same time
	Most     int // parts in one batch

	held  sync.Map     // ticket -> *holding, of each slot that runs parts
	alone sync.RWMutex // a part that may kill this process runs with nothing beside it
}

type holding struct {
	part   atomic.Int64
	cancel context.CancelFunc
}

type granted struct {
	Ticket, Request, Handler string
	TimeoutMs                int64 `json:"timeout_ms"`
	Parts                    []struct {
		Number       int64
		Attempt      int
		Alone        bool
		JSON         json.RawMessage
		Text, Base64 *string
	}
}

type object = map[string]any

// Run works until the context ends. Then running parts are finished and reported, and the others go
// back to be run elsewhere. An error means that somebody has to look, as after a wrong key.
func (w *Worker) Run(ctx context.Context) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	// Reports outlive the stop, but not for ever: the gateway may be away.
	late, end := context.WithCancel(context.Background())
	defer end()
	go func() {
		<-ctx.Done()
		time.AfterFunc(grace, end)
	}()
	go w.beat(late)
	errs := make(chan error, w.slots())
	for i := 0; i < w.slots(); i++ {
		go func() { errs <- w.runSlot(ctx, late) }()
	}
	var first error
	for i := 0; i < w.slots(); i++ {
		if err := <-errs; err != nil && first == nil {
			first = err
			stop()
		}
	}
	return first
}

// runSlot takes, runs and reports until the worker stops. It holds one ticket at a time.
func (w *Worker) runSlot(ctx, late context.Context) error {
	var now granted
	for {
		var next granted
		if now.Ticket == "" {
			if err := w.Gateway.Call(ctx, "POST", "/v1/take", w.ask(25), &next); err != nil {
				if ctx.Err() != nil {
					return nil
				}
				return err
			}
		} else {
			err := w.report(ctx, late, &now, w.runParts(ctx, &now), &next)
			w.held.Delete(now.Ticket) // not before: the lease is to stand until the report is heard
			if err != nil {
				return err
			}
		}
		now = next
	}
}

func (w *Worker) report(ctx, late context.Context, now *granted, said object, next *granted) error {
	said["ticket"] = now.Ticket
	if ctx.Err() == nil {
		said["next"] = w.ask(1) // not long: a report cannot be broken off, as a take can
	}
	err := w.Gateway.Call(late, "POST", "/v1/report", said, next)
	var refusal *Refusal
	if errors.As(err, &refusal) {
		switch refusal.Status {
		case 400, 413: // nothing was recorded: a result cannot be told
			if said["done"] == nil {
				return err
			}
			var failed []object
			for _, each := range now.Parts {
				failed = append(failed, failure(each.Number, err, ""))
			}
			return w.report(ctx, late, now, object{"failed": failed}, next)
		case 401, 403:
			return err
		}
	}
	if err != nil { // the ticket is of no use any more: the server has the parts run again
		log.Printf("report of %s: %v", now.Request, err)
	}
	if ctx.Err() != nil && next.Ticket != "" {
		tickets := []string{next.Ticket}
		*next = granted{}
		return w.Gateway.Call(late, "POST", "/v1/leave", object{"tickets": tickets}, nil)
	}
	return nil
}

// runParts runs parts one after another. Parts that the report does not name go back to the server.
func (w *Worker) runParts(ctx context.Context, now *granted) object {
	wanted, cancel := context.WithCancel(context.Background())
	defer cancel()
	mine := &holding{cancel: cancel}
	w.held.Store(now.Ticket, mine)
	defer mine.part.Store(0)
	done, failed, size := []object{}, []object{}, 0
	for i, each := range now.Parts {
		if wanted.Err() != nil || size > full || (i > 0 && ctx.Err() != nil) {
			break
		}
		mine.part.Store(each.Number)
		part := Part{now.Request, each.Number, max(1, each.Attempt), payload(each.JSON, each.Text, each.Base64)}
		result, trace, err := w.runPart(wanted, now, part, each.Alone)
		if err != nil {
			failed = append(failed, failure(part.Number, err, trace))
			continue
		}
		size += len(result)
		done = append(done, object{"part": part.Number, "result": result})
	}
	return object{"done": done, "failed": failed}
}
