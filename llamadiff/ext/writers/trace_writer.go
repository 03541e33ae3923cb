// llamadiff's trace writer for Go. SPDX-License-Identifier: MIT. Paste it anywhere.
//
// Records what an engine computes, its tensors ("taps"), in one .safetensors file:
//
//	trace := BeginTrace("mine.safetensors", tokens) // the prompt's ids
//	trace.State("name", "my engine") // what is known of the run
//	trace.Add("Qcur_rope-0", q, nTokens, nHeads, headDim) // q: []float32 or []float64
//	trace.AddTokens(next) // a decode step: its id,
//	trace.Add("Qcur_rope-0", q, 1, nHeads, headDim) // and its row below those before
//	err := trace.End()
//
// Errors stick: every call returns the first one, so the end's speaks for all. Values are copied and kept in memory
// until the end. It writes path.part and renames it to path: a trace of before is replaced, and a run that breaks off
// leaves it as it was.
package main

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"os"
	"strings"
)

// The axis of these that runs over tokens is the second: [head, query, ...].
var traceByHead = []string{"kq-", "kq_soft_max-", "kqv-", "kqv_mla-", "q_nope_absorbed-"}

var traceSizes = map[string]int{"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I32": 4}

type tracePart struct {
	shape []int
	bytes []byte
}

type traceTap struct {
	name, dtype string
	axis        int   // the one that runs over tokens
	shape       []int // with all rows
	parts       []tracePart
}

// TraceWriter is one trace being written.
type TraceWriter struct {
	path    string
	tokens  []int32
	nPrompt int
	facts   map[string]any
	taps    []*traceTap
	byName  map[string]*traceTap
	ended   bool
	err     error // the first one
}

// BeginTrace begins the trace of a run of these tokens: the prompt's; those of decode steps may follow.
func BeginTrace(path string, tokens []int32) *TraceWriter {
	t := &TraceWriter{path: path, nPrompt: len(tokens), facts: map[string]any{}, byName: map[string]*traceTap{}}
	if len(tokens) == 0 {
		t.fail("%s: the trace has no tokens", path)
	}
	t.AddTokens(tokens...)
	return t
}

func (t *TraceWriter) fail(format string, values ...any) error {
	if t.err == nil {
		t.err = fmt.Errorf(format, values...)
	}
	return t.err
}

// AddTokens adds the ids that a decode step runs.
func (t *TraceWriter) AddTokens(tokens ...int32) error {
	for _, id := range tokens {
		if id < 0 {
			return t.fail("%s: token %d is %d, no token id", t.path, len(t.tokens), id)
		}
		t.tokens = append(t.tokens, id)
	}
	return t.err
}

// State says what is known of the run: name, version, prompt, n_prefill (how many tokens were run in one go; the
// prompt's, if not stated), positions, batches (how many ran at a time, if not one by one after the prompt),
// settings.type_k and type_v (how the cache keeps rows: "F16"), settings.flash_attn,
// hyperparameters.rope.freq_base (and others of GGUF's keys), model.file, model.sha256.
func (t *TraceWriter) State(key string, value any) error {
	group, rest, _ := strings.Cut(key, ".")
	switch {
	case key == "prompt" || key == "n_prefill" || key == "positions" || key == "batches":
	case key == "name" || key == "version":
	case (group == "settings" || group == "hyperparameters" || group == "model") && rest != "":
	default:
		return t.fail("%s: nothing is stated by that name", key)
	}
	if _, twice := t.facts[key]; twice {
		return t.fail("%s: stated twice", key)
	}
	if _, err := json.Marshal(value); err != nil {
		return t.fail("%s: %v cannot be stated", key, value)
	}
	t.facts[key] = value
	return t.err
}

// Add adds the rows of a tap, []float32 or []float64: values without gaps (C order) and dims, outermost first. Rows
// that are added under the same name go below those before; scores may see more keys each time, and keys not yet seen
// are zero.
func (t *TraceWriter) Add(name string, values any, shape ...int) error {
	switch values.(type) {
	case []float32:
		return t.AddAs(name, "F32", values, shape...)
	case []float64:
		return t.AddAs(name, "F64", values, shape...)
	}
	return t.fail("%s: the values are %T, no []float32 or []float64", name, values)
}

// AddAs does the same for F16 and BF16 ([]uint16: their bits) and I32 ([]int32).
func (t *TraceWriter) AddAs(name, dtype string, values any, shape ...int) error {
	size, known := traceSizes[dtype]
	if t.ended {
		return t.fail("%s: the trace has ended", t.path)
	}
	if !known {
		return t.fail("%s: type %s; F64, F32, F16, BF16 and I32 are possible", name, dtype)
	}
	if name == "" || name == "__metadata__" {
		return t.fail("%q: is no name of a tap", name)
	}
	count, good := 1, len(shape) >= 1 && len(shape) <= 8
	for _, dim := range shape {
		good = good && dim >= 1 && dim <= 1<<40/count
		if good {
			count *= dim
		}
	}
	if !good {
		return t.fail("%s: shape %v; 1 to 8 dims of at least 1 are possible", name, shape)
	}
	width, length := 0, 0
	switch v := values.(type) {
	case []float32:
		width, length = 4, len(v)
	case []float64:
		width, length = 8, len(v)
	case []uint16:
		width, length = 2, len(v)
	case []int32:
		width, length = 4, len(v)
	}
	if width != size || length != count {
		return t.fail("%s: %d values of %d bits (%T) for %s %v", name, length, 8*width, values, dtype, shape)
	}
	if t.err != nil {
		return t.err
	}
	tap := t.byName[name]
	if tap == nil {
		tap = &traceTap{name: name, dtype: dtype, shape: append([]int{}, shape...)}
		for _, word := range traceByHead {
			if len(shape) == 3 && strings.HasPrefix(name, word) {
				tap.axis = 1
			}
		}
		tap.shape[tap.axis] = 0
		t.byName[name] = tap
		t.taps = append(t.taps, tap)
	}
	alike := tap.dtype == dtype && len(tap.shape) == len(shape)
	for i := 0; alike && i < len(shape); i++ {
		alike = i == tap.axis || tap.axis == 1 && i == 2 || tap.shape[i] == shape[i]
	}
	if !alike {
		return t.fail("%s: rows of another type or shape cannot follow those before", name)
	}
	tap.shape[tap.axis] += shape[tap.axis]
	if tap.axis == 1 && shape[2] > tap.shape[2] {
		tap.shape[2] = shape[2]
	}
	var data bytes.Buffer
	if err := binary.Write(&data, binary.LittleEndian, values); err != nil {
		return t.fail("%s: %w", name, err)
	}
	tap.parts = append(tap.parts, tracePart{append([]int{}, shape...), data.Bytes()})
	return nil
}

// End writes the file.
func (t *TraceWriter) End() error {
	if t.ended {
		t.fail("%s: the trace has ended", t.path)
	}
	t.ended = true
	if t.err != nil {
		return t.err
	}
	part := t.path + ".part"
	if err := t.write(part); err != nil {
		os.Remove(part)
		return t.fail("%w", err)
	}
	if err := os.Rename(part, t.path); err != nil {
		os.Remove(part)
		return t.fail("%w", err)
	}
	return nil
}

func (t *TraceWriter) write(part string) error {
	header, err := t.header()
	if err != nil {
		return err
	}
	file, err := os.Create(part)
	if err != nil {
		return err
	}
	defer file.Close()
	out := bufio.NewWriter(file) // its errors stick: the flush returns them
	binary.Write(out, binary.LittleEndian, uint64(len(header)))
	out.Write(header)
	for _, tap := range t.taps { // part below part, for each head; where a row is shorter than the longest, it is zero
		longest := traceProduct(tap.shape[tap.axis+1:]) * traceSizes[tap.dtype]
		for head := 0; head < traceProduct(tap.shape[:tap.axis]); head++ {
			for _, part := range tap.parts {
				row := traceProduct(part.shape[tap.axis+1:]) * traceSizes[tap.dtype]
				for i := head * part.shape[tap.axis]; i < (head+1)*part.shape[tap.axis]; i++ {
					out.Write(part.bytes[i*row : (i+1)*row])
					out.Write(make([]byte, longest-row))
				}
			}
		}
	}
	if err := out.Flush(); err != nil {
		return err
	}
	return file.Close()
}

func (t *TraceWriter) header() ([]byte, error) {
	producer := map[string]any{"writer": "go"}
	info := map[string]any{"schema": "llamadiff.trace/1", "tokens": t.tokens, "producer": producer}
	if len(t.tokens) > t.nPrompt {
		info["n_prefill"] = t.nPrompt
	}
	for key, value := range t.facts {
		group, rest, grouped := strings.Cut(key, ".")
		into := info
		if key == "name" || key == "version" || grouped && group != "model" {
			into = producer
		}
		if grouped {
			if into[group] == nil {
				into[group] = map[string]any{}
			}
			into, key = into[group].(map[string]any), rest
		}
		into[key] = value
	}
	text, err := json.Marshal(info)
	if err != nil {
		return nil, err
	}
	header := map[string]any{"__metadata__": map[string]string{"llamadiff": string(text)}} // JSON in a string of JSON
	end := 0
	for _, tap := range t.taps {
		start := end
		end += traceProduct(tap.shape) * traceSizes[tap.dtype]
		header[tap.name] = map[string]any{"dtype": tap.dtype, "shape": tap.shape, "data_offsets": []int{start, end}}
	}
	text, err = json.Marshal(header)
	return append(text, strings.Repeat(" ", (8-len(text)%8)%8)...), err
}

func traceProduct(shape []int) int {
	product := 1
	for _, dim := range shape {
		product *= dim
	}
	return product
}
