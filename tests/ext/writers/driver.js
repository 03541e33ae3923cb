// driver OUT TOKENS VALUES SCRIPT: does what each line of a script says, with values from a file; see test_writers.py.
const { TraceWriter } = require("./trace_writer.js");
const fs = require("node:fs");

const numbers = (text) => text.split(/[x,]/).filter(Boolean).map(Number);
const [out, tokens, file, script] = process.argv.slice(2);
const bytes = fs.readFileSync(file);
const arrays = { F64: Float64Array, F32: Float32Array, I32: Int32Array };
let next = 0;

function lines(trace) {
  const [n_tokens, n_keys] = [2, 2];
  /* LINES */
}

function take(dtype, shape) {
  const type = arrays[dtype] ?? Uint16Array;
  const size = shape.reduce((product, dim) => product * dim, type.BYTES_PER_ELEMENT);
  const own = bytes.subarray(next, (next += Math.min(Math.abs(size), bytes.length - next)));
  return new type(own.buffer.slice(own.byteOffset, own.byteOffset + own.length - (own.length % type.BYTES_PER_ELEMENT)));
}

const commands = {
  text: (trace, key, value) => trace.state(key, value),
  number: (trace, key, value) => trace.state(key, Number(value)),
  flag: (trace, key, value) => trace.state(key, value === "true"),
  list: (trace, key, value) => trace.state(key, numbers(value)),
  tokens: (trace, ids) => trace.addTokens(numbers(ids)),
  lines,
  abort: () => process.abort(),
  end: (trace) => trace.end(),
  add(trace, dtype, dims, name) {
    const [shape, isBits] = [numbers(dims), !["F32", "F64"].includes(dtype)];
    if (isBits) trace.addAs(name, dtype, take(dtype, shape), shape);
    else trace.add(name, take(dtype, shape), shape);
  },
};

try {
  const trace = new TraceWriter(out, numbers(tokens));
  for (const line of fs.readFileSync(script, "utf8").split("\n").slice(0, -1)) {
    const [command, ...rest] = line.split("\t");
    commands[command](trace, ...rest);
  }
} catch (error) {
  console.error(error.message);
  process.exitCode = 1;
}
