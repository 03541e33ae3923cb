// driver OUT TOKENS VALUES LAST [NAME:2x3]...: writes taps with values from a file of f32; LAST: end or abort.
const { begin, add, end } = require("./trace_writer.js");

const numbers = (text) => text.split(/[x,]/).filter(Boolean).map(Number);
const [out, tokens, file, last, ...taps] = process.argv.slice(2);
const bytes = require("node:fs").readFileSync(file);
const values = new Float32Array(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length));

try {
  const trace = begin(out, numbers(tokens));
  let next = 0;
  for (const tap of taps) {
    const colon = tap.lastIndexOf(":");
    const shape = numbers(tap.slice(colon + 1));
    const count = Math.abs(shape.reduce((product, dim) => product * dim, 1));
    add(trace, tap.slice(0, colon), values.subarray(next, next + count), shape);
    next += count;
  }
  if (last === "abort") process.abort();
  end(trace);
} catch (error) {
  console.error(error.message);
  process.exitCode = 1;
}
