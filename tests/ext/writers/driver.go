// driver OUT TOKENS VALUES SCRIPT: does what each line of a script says, with values from a file; see test_writers.py.
package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
)

func numbers(text string) (out []int) {
	for _, word := range strings.FieldsFunc(text, func(c rune) bool { return c == 'x' || c == ',' }) {
		n, _ := strconv.Atoi(word)
		out = append(out, n)
	}
	return out
}

func ids(text string) (out []int32) {
	for _, n := range numbers(text) {
		out = append(out, int32(n))
	}
	return out
}

func lines(trace *TraceWriter) {
	n_tokens, n_keys := 2, 2
	/* LINES */
	fmt.Fprint(os.Stdout, n_tokens, n_keys)
}

func take(from *bytes.Reader, dtype string, shape []int) any {
	size := map[string]int{"F64": 8, "F32": 4, "I32": 4}[dtype]
	if size == 0 {
		size = 2
	}
	count := 1
	for _, dim := range shape {
		count *= dim
	}
	if count < 0 {
		count = -count
	}
	if count > from.Len()/size {
		count = from.Len() / size
	}
	var values any = make([]uint16, count)
	switch dtype {
	case "F64":
		values = make([]float64, count)
	case "F32":
		values = make([]float32, count)
	case "I32":
		values = make([]int32, count)
	}
	binary.Read(from, binary.LittleEndian, values)
	return values
}

func run(args []string) error {
	data, _ := os.ReadFile(args[2])
	script, _ := os.ReadFile(args[3])
	from := bytes.NewReader(data)
	trace := BeginTrace(args[0], ids(args[1]))
	for _, line := range strings.Split(strings.TrimSuffix(string(script), "\n"), "\n") {
		parts := strings.Split(line, "\t")
		switch parts[0] {
		case "text":
			trace.State(parts[1], parts[2])
		case "number":
			if n, err := strconv.Atoi(parts[2]); err == nil {
				trace.State(parts[1], n)
			} else {
				x, _ := strconv.ParseFloat(parts[2], 64)
				trace.State(parts[1], x)
			}
		case "flag":
			trace.State(parts[1], parts[2] == "true")
		case "list":
			trace.State(parts[1], numbers(parts[2]))
		case "tokens":
			trace.AddTokens(ids(parts[1])...)
		case "lines":
			lines(trace)
		case "abort":
			syscall.Kill(os.Getpid(), syscall.SIGKILL) // Go's runtime handles SIGABRT, and can hang in it
			select {}
		case "end":
			trace.End()
		case "add":
			shape := numbers(parts[2])
			values := take(from, parts[1], shape)
			if parts[1] == "F32" || parts[1] == "F64" {
				trace.Add(parts[3], values, shape...)
			} else {
				trace.AddAs(parts[3], parts[1], values, shape...)
			}
		}
	}
	return trace.AddTokens() // the first error
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
