// A stranger in JavaScript that lays activations out by feature: one lane for each, with the values of all
// tokens side by side, so that a head is a run of lanes and a product adds weighted lanes. Sums are in
// float64, and what is kept is in float32.
//
//     node lanes.js MODEL DUMP [MISTAKE]      (formats: tests/proof/strangers/programs.py)
'use strict';
const fs = require('fs');

// Mistakes, and the op that each of them is in.
const MISTAKES = {
  'byte-offset': 'embd', 'wrong-stride': 'attn_norm', 'end-inclusive': 'Kcur_proj',
  'sorted-as-text': 'Qcur_rope', 'shared-sums': 'kq', 'clamped-bytes': 'kq_soft_max', 'int16-wraps': 'ffn_up',
  'truncated-index': 'ffn_swiglu', 'negative-modulo': 'ffn_out', 'view-not-copy': 'result_output',
};
const [modelPath, dumpPath, mistake] = process.argv.slice(2);
if (!dumpPath || (mistake !== undefined && !Object.hasOwn(MISTAKES, mistake))) {
  console.error(`usage: node lanes.js MODEL DUMP [${Object.keys(MISTAKES).join('|')}]`);
  process.exit(2);
}
const slips = (name, op) => mistake === name && MISTAKES[name] === op;

// -- the model ----------------------------------------------------------------------------------------------

const file = new Uint8Array(fs.readFileSync(modelPath)).buffer; // a copy that begins at 0
let cursor = 0;

function take(Type, count) {
  const values = new Type(file, cursor, count);
  cursor += values.byteLength;
  return values;
}

const [nLayers, embd, nHeads, nKv, dim, ff, vocab, inPairs, hasBias, hasHeadNorm, n] = take(Int32Array, 11);
const [eps, base] = take(Float32Array, 2);
const tokens = take(Int32Array, n);
const weights = (count, there = true) => (there ? take(Float32Array, count) : null);

function readLayer() { // in the order of the file
  const [qs, kvs] = [nHeads * dim, nKv * dim];
  return {
    attnNorm: weights(embd), q: weights(qs * embd), k: weights(kvs * embd), v: weights(kvs * embd),
    qBias: weights(qs, hasBias), kBias: weights(kvs, hasBias), vBias: weights(kvs, hasBias),
    qNorm: weights(dim, hasHeadNorm), kNorm: weights(dim, hasHeadNorm), out: weights(embd * qs),
    ffnNorm: weights(embd), gate: weights(ff * embd), up: weights(ff * embd), down: weights(embd * ff),
  };
}

const table = weights(vocab * embd);
const layers = Array.from({ length: nLayers }, readLayer);
const lastNorm = weights(embd);
const head = cursor < file.byteLength ? weights(vocab * embd) : table;

// -- lanes: width * n values, those of feature j from j * n on ----------------------------------------------

const lanes = (width) => new Float32Array(width * n);
const widthOf = (x) => x.length / n;

function embedded() {
  const x = lanes(embd);
  tokens.forEach((token, i) => {
    const unit = slips('byte-offset', 'embd') ? 1 : 4; // mistake: elements, where bytes are asked for
    const row = new Float32Array(file, table.byteOffset + token * embd * unit, embd);
    row.forEach((value, j) => { x[j * n + i] = value; });
  });
  return x;
}

// RMS norms of as many lanes at a time as there are gains: of all, or of each head's.
function normed(op, x, gains) {
  const [y, size] = [lanes(widthOf(x)), gains.length];
  for (let first = 0; first < x.length; first += size * n) {
    for (let i = 0; i < n; i++) {
      let squares = 0;
      for (let j = 0; j < size; j++) {
        // mistake: as if a token's values were neighbours
        const at = first + (slips('wrong-stride', op) ? i * size + j : j * n + i);
        squares += x[at] * x[at];
      }
      const factor = 1 / Math.sqrt(squares / size + eps);
      for (let j = 0; j < size; j++) y[first + j * n + i] = x[first + j * n + i] * factor * gains[j];
    }
  }
  return y;
}

// A matrix times lanes; each of its rows is begun at another column.
function product(op, matrix, x, bias = null) {
  const width = widthOf(x);
  const [y, sums] = [lanes(matrix.length / width), new Float64Array(n)];
  for (let r = 0; r < widthOf(y); r++) {
    // mistake: the last index, but subarray leaves its end out
    const row = matrix.subarray(r * width, r * width + (slips('end-inclusive', op) ? width - 1 : width));
    sums.fill(bias ? bias[r] : 0);
    for (let step = 0; step < width; step++) {
      let j = (step + width - (r % width)) % width;
      if (slips('negative-modulo', op)) j = (step - r) % width; // mistake: % of a negative number is negative
      const weight = row[j] || 0;
      for (let i = 0; weight && i < n; i++) sums[i] += weight * x[j * n + i];
    }
    if (slips('int16-wraps', op)) { // mistake: with 14 bits after the point there is room for -2 to 2 only
      Int16Array.from(sums, (sum) => sum * 16384).forEach((whole, i) => { sums[i] = whole / 16384; });
    }
    y.set(sums, r * n);
  }
  return y;
}

// -- attention ----------------------------------------------------------------------------------------------

function rotated(op, x) {
  const positions = Array.from(tokens.keys());
  if (slips('sorted-as-text', op)) positions.sort(); // mistake: sort compares numbers as text, 10 before 2
  const [y, half] = [lanes(widthOf(x)), dim / 2];
  for (let first = 0; first < widthOf(x); first += dim) {
    for (let pair = 0; pair < half; pair++) {
      const a = (first + (inPairs ? 2 * pair : pair)) * n;
      const b = a + (inPairs ? 1 : half) * n;
      positions.forEach((position, i) => {
        const angle = position * base ** (-pair / half);
        y[a + i] = x[a + i] * Math.cos(angle) - x[b + i] * Math.sin(angle);
        y[b + i] = x[a + i] * Math.sin(angle) + x[b + i] * Math.cos(angle);
      });
    }
  }
  return y;
}

// The lanes of the KV head that query head h reads.
function shared(x, h) {
  const start = Math.floor(h / (nHeads / nKv)) * dim * n;
  return x.subarray(start, start + dim * n);
}

function scores(q, k) { // [head, query, key], of all keys
  const [all, sums] = [new Float32Array(nHeads * n * n), new Float64Array(n * n)];
  for (let h = 0; h < nHeads; h++) {
    const [queries, keys] = [q.subarray(h * dim * n), shared(k, h)];
    if (!slips('shared-sums', 'kq')) sums.fill(0); // mistake: heads share sums, and nobody clears them
    for (let lane = 0; lane < dim * n; lane += n) {
      sums.forEach((_, at) => { sums[at] += queries[lane + Math.floor(at / n)] * keys[lane + (at % n)]; });
    }
    all.set(sums, h * n * n);
  }
  return all;
}

function softmax(kq) {
  const all = new Float32Array(kq.length);
  for (let row = 0; row < nHeads * n; row++) {
    const seen = Array.from(kq.subarray(row * n, row * n + (row % n) + 1), (score) => score / Math.sqrt(dim));
    const largest = Math.max(...seen);
    const powers = seen.map((score) => Math.exp(score - largest));
    const total = powers.reduce((a, b) => a + b);
    let shares = powers.map((power) => power / total);
    if (slips('clamped-bytes', 'kq_soft_max')) { // mistake: kept like pixels, in steps of 1/255
      shares = Array.from(Uint8ClampedArray.from(shares, (share) => share * 255), (byte) => byte / 255);
    }
    all.set(shares, row * n);
  }
  return all;
}

function mixed(shares, v) {
  const y = lanes(nHeads * dim);
  for (let at = 0; at < y.length; at++) {
    const [i, d, h] = [at % n, Math.floor(at / n) % dim, Math.floor(at / n / dim)];
    const values = shared(v, h).subarray(d * n, d * n + i + 1);
    y[at] = values.reduce((mix, value, t) => mix + value * shares[(h * n + i) * n + t], 0);
  }
  return y;
}

// -- the run, and what is dumped of it ----------------------------------------------------------------------

function swiglu(gate, up) {
  return gate.map((value, at) => {
    // mistake: a table of sigmoids, eight to 1, whose index is cut towards 0
    const x = slips('truncated-index', 'ffn_swiglu') ? (value * 8 | 0) / 8 : value;
    return value / (1 + Math.exp(-x)) * up[at];
  });
}

function logits(x) { // rows, one for each token
  const row = new Float32Array(vocab);
  return Array.from(tokens, (_, i) => {
    for (let r = 0; r < vocab; r++) {
      let sum = 0;
      for (let j = 0; j < embd; j++) sum += head[r * embd + j] * x[j * n + i];
      row[r] = sum;
    }
    // mistake: views, all of one buffer
    return slips('view-not-copy', 'result_output') ? row.subarray() : row.slice();
  });
}

const added = (x, y) => x.map((value, at) => value + y[at]);
const parts = [];

function record(name, shape, values) {
  parts.push(Buffer.from(`${name} ${shape.join(' ')}\n`), Buffer.from(values.buffer));
}

function keep(name, x) { // dumps have tokens first
  const width = widthOf(x);
  const shape = /_(normed|rope)-/.test(name) ? [n, width / dim, dim] : [n, width];
  record(name, shape, x.map((_, at) => x[(at % width) * n + Math.floor(at / width)]));
  return x;
}

let stream = keep('embd', embedded());
layers.forEach((w, layer) => {
  const tap = (op, y) => keep(`${op}-${layer}`, y);
  const norm = (op, y, gains) => tap(op, normed(op, y, gains));
  const times = (op, matrix, y, bias) => tap(op, product(op, matrix, y, bias));
  const calm = norm('attn_norm', stream, w.attnNorm);
  let [q, k] = [times('Qcur_proj', w.q, calm, w.qBias), times('Kcur_proj', w.k, calm, w.kBias)];
  const v = times('Vcur_proj', w.v, calm, w.vBias);
  if (hasHeadNorm) [q, k] = [norm('Qcur_normed', q, w.qNorm), norm('Kcur_normed', k, w.kNorm)];
  const kq = scores(tap('Qcur_rope', rotated('Qcur_rope', q)), tap('Kcur_rope', rotated('Kcur_rope', k)));
  const shares = softmax(kq);
  record(`kq-${layer}`, [nHeads, n, n], kq);
  record(`kq_soft_max-${layer}`, [nHeads, n, n], shares);
  stream = tap('ffn_inp', added(times('attn_out', w.out, tap('kqv_out', mixed(shares, v))), stream));
  const quiet = norm('ffn_norm', stream, w.ffnNorm);
  const active = tap('ffn_swiglu', swiglu(times('ffn_gate', w.gate, quiet), times('ffn_up', w.up, quiet)));
  stream = tap('l_out', added(times('ffn_out', w.down, active), stream));
});
const rows = logits(keep('result_norm', normed('result_norm', stream, lastNorm)));
record('result_output', [n, vocab], Float32Array.from(rows.flatMap((row) => [...row])));
fs.writeFileSync(dumpPath, Buffer.concat(parts));
