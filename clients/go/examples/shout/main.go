// A worker that shouts: STREAMQ_GATEWAY=http://127.0.0.1:8470 go run ./examples/shout
package main

import (
	"context"
	"log"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"streamq"
)

func shout(ctx context.Context, part streamq.Part) (any, error) {
	return strings.ToUpper(string(part.Payload)), nil
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	worker := streamq.Worker{
		Gateway:  streamq.FromEnv(),
		Queue:    os.Getenv("STREAMQ_QUEUE"),
		Handlers: map[string]streamq.Handler{"shout": shout},
		Slots:    4,
	}
	if err := worker.Run(ctx); err != nil {
		log.Fatal(err)
	}
}
