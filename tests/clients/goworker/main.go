// The worker of the tests: shouts, slowly if PAUSE_MS says so. With HANG it hangs in its first part.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"streamq"
)

// note appends a line for the start or the end of a part, as tests/support/fleet.py reads them.
func note(word string, part streamq.Part) {
	if os.Getenv("NOTES") == "" {
		return
	}
	file, err := os.OpenFile(os.Getenv("NOTES"), os.O_APPEND|os.O_WRONLY|os.O_CREATE, 0o644)
	if err != nil {
		log.Fatal(err)
	}
	now := float64(time.Now().UnixMicro()) / 1e6
	fmt.Fprintf(file, "%s %.6f %s %s %d\n", word, now, os.Getenv("WORKER"), part.Request, part.Number)
	file.Close()
}

func shout(ctx context.Context, part streamq.Part) (any, error) {
	note("S", part)
	if folder := os.Getenv("HANG"); folder != "" {
		if err := os.Mkdir(folder+"/go", 0o755); err != nil {
			return nil, err
		}
		time.Sleep(time.Hour)
	}
	pause, _ := strconv.Atoi(os.Getenv("PAUSE_MS"))
	time.Sleep(time.Duration(pause) * time.Millisecond)
	note("E", part)
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
