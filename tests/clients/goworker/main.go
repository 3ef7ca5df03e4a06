// The worker of the tests: shouts, slowly if PAUSE_MS says so. With HANG it hangs in its first part.
package main

import (
	"context"
	"log"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"streamq"
)

func shout(ctx context.Context, part streamq.Part) (any, error) {
	if folder := os.Getenv("HANG"); folder != "" {
		if err := os.Mkdir(folder+"/go", 0o755); err != nil {
			return nil, err
		}
		time.Sleep(time.Hour)
	}
	pause, _ := strconv.Atoi(os.Getenv("PAUSE_MS"))
	time.Sleep(time.Duration(pause) * time.Millisecond)
	return strings.ToUpper(string(part.Payload)), nil
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	slots, _ := strconv.Atoi(os.Getenv("SLOTS"))
	worker := streamq.Worker{Gateway: streamq.FromEnv(), Queue: os.Getenv("STREAMQ_QUEUE"), Slots: slots,
		Handlers: map[string]streamq.Handler{"shout": shout}}
	if err := worker.Run(ctx); err != nil {
		log.Fatal(err)
	}
}
