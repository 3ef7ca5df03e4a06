// Puts the lines of standard input through a handler, and prints the results in input order:
//
//	go run ./examples/load ID HANDLER < lines.txt > results.txt
package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log"
	"os"

	"streamq"
)

func main() {
	if len(os.Args) != 3 {
		log.Fatal("usage: load ID HANDLER < lines.txt > results.txt")
	}
	ctx, gateway := context.Background(), streamq.FromEnv()
	request := streamq.Request{ID: os.Args[1], Handler: os.Args[2], Queue: os.Getenv("STREAMQ_QUEUE")}
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 1<<20)
	_, err := gateway.Submit(ctx, request, func() (any, error) {
		if lines.Scan() {
			return lines.Text(), nil
		}
		if lines.Err() != nil {
			return nil, lines.Err()
		}
		return nil, io.EOF
	})
	if err != nil {
		log.Fatal(err)
	}
	err = gateway.Results(ctx, request.ID, func(result streamq.Result) error {
		_, err := fmt.Println(result)
		return err
	})
	if err != nil {
		log.Fatal(err)
	}
}
