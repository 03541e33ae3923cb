// llamadiff's trace writer for JavaScript (Node, Bun, Deno). SPDX-License-Identifier: MIT. Paste it anywhere.
//
// Records what an engine computes, float32 tensors ("taps") in one .safetensors file:
//
//     const trace = begin("mine.safetensors", tokens);
//     add(trace, "Qcur_rope-0", q, [nTokens, nHeads, headDim]); // q: a Float32Array
//     end(trace);
//
// Every function throws on an error, which ends the trace: later calls throw as well. The values are written when they
// are added, to path.part; it is renamed at the end, so a run that breaks off leaves no trace.
//
//     8 bytes          length of the header, little-endian
//     HEADER_BYTES     the header: JSON, padded with spaces; its place is kept free and written last
//     the rest         the values, in the order they came
//
// Decode steps: a tap is added once and has one row for each token, the prompt's and then the steps'. Keep each tap's
// rows until the last token is known, then begin with all tokens and add. Scores are [head, query, key], and zero for
// the keys that came after the query.
//
// A browser has neither files nor Buffer: let add keep values.slice() in a list where it calls writeAll, and let end
// offer new Blob([BigUint64Array.of(BigInt(HEADER_BYTES)), header.padEnd(HEADER_BYTES), ...list]) as a download.
"use strict";

// An ES module may import { begin, add, end } from "./trace_writer.cjs", or have all this pasted into it.
const fs = typeof require === "function" ? require("fs") : process.getBuiltinModule("fs");

const HEADER_BYTES = 1 << 20; // enough for 10000 taps; a multiple of 8

// Begin the trace of a run of these tokens. -> what add and end take
function begin(path, tokens) {
  const ids = Array.from(tokens, Number); // an Array, an Int32Array, a BigInt64Array
  if (ids.length === 0) throw new RangeError(`${path}: the trace has no tokens`);
  const wrong = ids.findIndex((id) => !Number.isInteger(id) || id < 0 || id >= 2 ** 31);
  if (wrong >= 0) throw new RangeError(`${path}: token ${wrong} is ${ids[wrong]}, no token id`);
  const info = JSON.stringify({ schema: "llamadiff.trace/1", tokens: ids });
  const header = JSON.stringify({ __metadata__: { llamadiff: info } }).slice(0, -1); // still open: taps follow
  if (header.length >= HEADER_BYTES) throw new RangeError(`${path}: too many tokens; raise HEADER_BYTES`);
  const part = `${path}.part`;
  return { path, part, file: fs.openSync(part, "w"), names: new Set(["__metadata__"]), header, dataSize: 0 };
}

// Write a tap: dims outermost first, values without gaps (C order).
function add(writer, name, values, shape) {
  guard(writer, () => {
    if (typeof name !== "string" || !/^[ !#-~]{1,256}$/.test(name)) {
      throw new RangeError(`${JSON.stringify(name)}: a name is 1 to 256 characters of printable ASCII without quotes`);
    }
    if (writer.names.has(name)) {
      throw new RangeError(`${name}: added twice; add the rows of all steps in one call`);
    }
    const dims = Array.from(shape);
    if (dims.length < 1 || dims.length > 8 || !dims.every((dim) => Number.isSafeInteger(dim) && dim > 0)) {
      throw new RangeError(`${name}: shape [${dims}]; 1 to 8 dims of at least 1 are possible`);
    }
    if (!(values instanceof Float32Array)) throw new TypeError(`${name}: the values are no Float32Array`);
    if (dims.reduce((count, dim) => count * dim, 1) !== values.length) {
      throw new RangeError(`${name}: ${values.length} values for shape [${dims}]`);
    }
    const [start, end] = [writer.dataSize, writer.dataSize + values.byteLength];
    const tensor = { dtype: "F32", shape: dims, data_offsets: [start, end] };
    const entry = `,${JSON.stringify(name)}:${JSON.stringify(tensor)}`;
    if (writer.header.length + entry.length >= HEADER_BYTES) {
      throw new RangeError(`${name}: too many taps, the header is full; raise HEADER_BYTES`);
    }
    writeAll(writer.file, littleEndian(values), 8 + HEADER_BYTES + start);
    writer.header += entry;
    writer.names.add(name);
    writer.dataSize = end;
  });
}

// Write the header and give the file its name.
function end(writer) {
  guard(writer, () => {
    const head = Buffer.alloc(8 + HEADER_BYTES, " ");
    head.writeBigUInt64LE(BigInt(HEADER_BYTES));
    head.write(`${writer.header}}`, 8, "latin1");
    writeAll(writer.file, head, 0);
    fs.closeSync(writer.file);
    writer.file = null;
    fs.renameSync(writer.part, writer.path);
  });
}

// Do the work; if it fails, close the writer and remove the file, which has not got its name.
function guard(writer, work) {
  if (writer.file === null) throw new Error(`${writer.path}: the trace has ended`);
  try {
    work();
  } catch (error) {
    if (writer.file !== null) fs.closeSync(writer.file);
    writer.file = null;
    fs.rmSync(writer.part, { force: true });
    throw error;
  }
}

// The values' bytes. A typed array has the machine's byte order: as the file's, nearly everywhere.
function littleEndian(values) {
  const bytes = Buffer.from(values.buffer, values.byteOffset, values.byteLength);
  const isLittle = new Uint8Array(Uint16Array.of(1).buffer)[0] === 1;
  return isLittle ? bytes : Buffer.from(bytes).swap32();
}

// One write may take less than it is given, and at most 2 GiB.
function writeAll(file, bytes, position) {
  for (let done = 0; done < bytes.length; ) {
    done += fs.writeSync(file, bytes, done, Math.min(bytes.length - done, 1 << 30), position + done);
  }
}

if (typeof module !== "undefined") module.exports = { begin, add, end };
