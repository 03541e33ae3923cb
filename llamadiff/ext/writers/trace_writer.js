// llamadiff's trace writer for JavaScript (Node, Bun, Deno). SPDX-License-Identifier: MIT. Paste it anywhere.
//
// Records what an engine computes, its tensors ("taps"), in one .safetensors file:
//
//     const trace = new TraceWriter("mine.safetensors", tokens); // the prompt's ids
//     trace.state("name", "my engine"); // what is known of the run
//     trace.add("Qcur_rope-0", q, [nTokens, nHeads, headDim]); // q: a Float32Array or Float64Array
//     trace.addTokens([next]); // a decode step: its id,
//     trace.add("Qcur_rope-0", q, [1, nHeads, headDim]); // and its row below those before
//     trace.end();
//
// An error is thrown. Values are copied and kept in memory until the end. It writes path.part and renames it to path: a
// trace of before is replaced, and a run that breaks off leaves it as it was.
// A browser has no files: there, offer new Blob([...trace.chunks()]) as a download instead of calling end.
"use strict";

// The axis of these that runs over tokens is the second: [head, query, ...].
const BY_HEAD = /^(kq|kq_soft_max|kqv|kqv_mla|q_nope_absorbed)-/;
const SIZES = { F64: 8, F32: 4, F16: 2, BF16: 2, I32: 4 };
const RUN = ["prompt", "n_prefill", "positions", "batches"];
const PRODUCER = ["name", "version"];
const GROUPS = ["settings", "hyperparameters", "model"];

class TraceWriter {
  // Begin the trace of a run of these tokens: the prompt's; those of decode steps may follow.
  constructor(path, tokens) {
    Object.assign(this, { path, tokens: [], taps: new Map(), facts: new Map(), ended: false });
    this.addTokens(tokens);
    if (this.tokens.length === 0) throw new RangeError(`${path}: the trace has no tokens`);
    this.nPrompt = this.tokens.length;
  }

  // The ids that a decode step runs.
  addTokens(tokens) {
    for (const id of Array.from(tokens, Number)) {
      if (!Number.isInteger(id) || id < 0 || id >= 2 ** 31) {
        throw new RangeError(`${this.path}: token ${this.tokens.length} is ${id}, no token id`);
      }
      this.tokens.push(id);
    }
  }

  // State what is known of the run: name, version, prompt, n_prefill (how many tokens were run in one go; the prompt's,
  // if not stated), positions, batches (how many ran at a time, if not one by one after the prompt),
  // settings.type_k and type_v (how the cache keeps rows: "F16"), settings.flash_attn,
  // hyperparameters.rope.freq_base (and others of GGUF's keys), model.file, model.sha256.
  state(key, value) {
    const [group, ...rest] = key.split(".");
    const known = RUN.includes(key) || PRODUCER.includes(key) || (GROUPS.includes(group) && rest.length > 0);
    if (!known) throw new RangeError(`${key}: nothing is stated by that name`);
    if (this.facts.has(key)) throw new RangeError(`${key}: stated twice`);
    if (typeof value === "number" && !Number.isFinite(value)) throw new RangeError(`${key}: ${value} cannot be stated`);
    this.facts.set(key, ArrayBuffer.isView(value) ? Array.from(value, Number) : value);
  }

  // Add the rows of a tap: values without gaps (C order) and dims, outermost first. Rows that are added under the same
  // name go below those before; scores may see more keys each time, and keys not yet seen are zero.
  add(name, values, shape) {
    const dtype = { Float32Array: "F32", Float64Array: "F64", Float16Array: "F16" }[values?.constructor?.name];
    if (dtype === undefined) throw new TypeError(`${name}: the values are no Float32Array or Float64Array`);
    this.addAs(name, dtype, values, shape);
  }

  // The same for F16 and BF16 (a Uint16Array: their bits) and I32.
  addAs(name, dtype, values, shape) {
    const size = SIZES[dtype];
    const dims = Array.from(shape);
    if (this.ended) throw new Error(`${this.path}: the trace has ended`);
    if (size === undefined) {
      throw new RangeError(`${name}: type ${dtype}; ${Object.keys(SIZES).join(", ")} are possible`);
    }
    if (typeof name !== "string" || name === "" || name === "__metadata__") {
      throw new RangeError(`${JSON.stringify(name)}: is no name of a tap`);
    }
    if (dims.length < 1 || dims.length > 8 || !dims.every((dim) => Number.isSafeInteger(dim) && dim > 0)) {
      throw new RangeError(`${name}: shape [${dims}]; 1 to 8 dims of at least 1 are possible`);
    }
    if (!ArrayBuffer.isView(values) || values.BYTES_PER_ELEMENT !== size || product(dims) !== values.length) {
      const bits = 8 * values?.BYTES_PER_ELEMENT;
      throw new RangeError(`${name}: ${values?.length} values of ${bits} bits for ${dtype} [${dims}]`);
    }
    const axis = dims.length === 3 && BY_HEAD.test(name) ? 1 : 0;
    const none = dims.map((dim, i) => (i === axis ? 0 : dim));
    const tap = this.taps.get(name) ?? { dtype, size, axis, shape: none, parts: [] };
    const alike = (dim, i) => i === axis || (axis === 1 && i === 2) || dim === tap.shape[i];
    if (tap.dtype !== dtype || tap.shape.length !== dims.length || !dims.every(alike)) {
      throw new RangeError(`${name}: rows of another type or shape cannot follow those before`);
    }
    tap.shape[axis] += dims[axis];
    if (axis === 1) tap.shape[2] = Math.max(tap.shape[2], dims[2]);
    tap.parts.push({ shape: dims, bytes: littleEndian(values, size) });
    this.taps.set(name, tap);
  }

  // Write the file.
  end() {
    if (this.ended) throw new Error(`${this.path}: the trace has ended`);
    this.ended = true;
    const fs = typeof require === "function" ? require("fs") : process.getBuiltinModule("fs");
    const part = `${this.path}.part`;
    const file = fs.openSync(part, "w");
    try {
      try {
        for (const bytes of this.chunks()) {
          for (let done = 0; done < bytes.length; ) done += fs.writeSync(file, bytes, done);
        }
      } finally {
        fs.closeSync(file);
      }
      fs.renameSync(part, this.path);
    } catch (error) {
      fs.rmSync(part, { force: true });
      throw error;
    }
  }

  // The file's bytes: its header; then of each tap, part below part for each head. What rows are too short is zero.
  *chunks() {
    const header = new TextEncoder().encode(this.header());
    const padded = new Uint8Array(Math.ceil(header.length / 8) * 8).fill(32);
    padded.set(header);
    yield new Uint8Array(BigUint64Array.of(BigInt(padded.length)).buffer);
    yield padded;
    for (const { size, axis, shape, parts } of this.taps.values()) {
      const longest = product(shape.slice(axis + 1)) * size;
      for (let head = 0; head < product(shape.slice(0, axis)); head++) {
        for (const part of parts) {
          const row = product(part.shape.slice(axis + 1)) * size;
          const rows = part.shape[axis];
          const bytes = new Uint8Array(rows * longest);
          for (let i = 0; i < rows; i++) {
            const start = (head * rows + i) * row;
            bytes.set(part.bytes.subarray(start, start + row), i * longest);
          }
          yield bytes;
        }
      }
    }
  }

  header() {
    const group = (name) => {
      const own = [...this.facts].filter(([key]) => key.startsWith(`${name}.`));
      const facts = Object.fromEntries(own.map(([key, value]) => [key.slice(name.length + 1), value]));
      return own.length > 0 ? { [name]: facts } : {};
    };
    const facts = (keys) => Object.fromEntries(keys.map((key) => [key, this.facts.get(key)])); // undefined is left out
    const producer = { writer: "js", ...facts(PRODUCER), ...group("settings"), ...group("hyperparameters") };
    const run = { n_prefill: this.tokens.length > this.nPrompt ? this.nPrompt : undefined };
    for (const key of RUN) run[key] = this.facts.get(key) ?? run[key];
    const info = { schema: "llamadiff.trace/1", tokens: this.tokens, ...run, producer, ...group("model") };
    const header = { __metadata__: { llamadiff: JSON.stringify(info) } }; // JSON in a string of JSON
    let end = 0;
    for (const [name, { dtype, size, shape }] of this.taps) {
      const start = end;
      end += product(shape) * size;
      header[name] = { dtype, shape, data_offsets: [start, end] };
    }
    return JSON.stringify(header);
  }
}

function product(dims) {
  return dims.reduce((count, dim) => count * dim, 1);
}

// A copy of the values' bytes. A typed array has the machine's byte order: as the file's, nearly everywhere.
function littleEndian(values, size) {
  const bytes = new Uint8Array(values.buffer, values.byteOffset, values.byteLength).slice();
  const isLittle = new Uint8Array(Uint16Array.of(1).buffer)[0] === 1;
  for (let i = 0; !isLittle && i < bytes.length; i += size) bytes.subarray(i, i + size).reverse();
  return bytes;
}

if (typeof module !== "undefined") module.exports = { TraceWriter };
