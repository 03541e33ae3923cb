// The operations, on rows of float32 that lie one behind the other. Sums are in float64; what is between is rounded
// to float32 where llama.cpp rounds it, since the last bit can decide to what an operand is rounded next.
'use strict';
const { fround } = Math;

// Rows of x times a matrix [outputs, width]; four rows at a time share a weight that was read.
function product(matrix, x, width, bias = null) {
  const [outputs, n] = [matrix.length / width, x.length / width];
  const y = new Float32Array(n * outputs);
  let i = 0;
  for (; i + 4 <= n; i += 4) fourRows(matrix, x, width, y, i, outputs);
  for (; i < n; i++) oneRow(matrix, x, width, y, i, outputs);
  if (bias) for (let at = 0; at < y.length; at++) y[at] += bias[at % outputs];
  return y;
}

function fourRows(matrix, x, width, y, i, outputs) {
  const [a, b, c, d] = [i * width, (i + 1) * width, (i + 2) * width, (i + 3) * width];
  for (let r = 0; r < outputs; r++) {
    let [s, t, u, v] = [0, 0, 0, 0];
    for (let j = 0, at = r * width; j < width; j++, at++) {
      const weight = matrix[at];
      s += weight * x[a + j];
      t += weight * x[b + j];
      u += weight * x[c + j];
      v += weight * x[d + j];
    }
    y[i * outputs + r] = s;
    y[(i + 1) * outputs + r] = t;
    y[(i + 2) * outputs + r] = u;
    y[(i + 3) * outputs + r] = v;
  }
}

// Four outputs at a time; each is added in the order in which it is added beside other rows.
function oneRow(matrix, x, width, y, i, outputs) {
  const from = i * width;
  for (let r = 0; r < outputs; r += 4) {
    const a = r * width;
    const b = Math.min(r + 1, outputs - 1) * width;
    const c = Math.min(r + 2, outputs - 1) * width;
    const d = Math.min(r + 3, outputs - 1) * width;
    let [s, t, u, v] = [0, 0, 0, 0];
    for (let j = 0; j < width; j++) {
      const value = x[from + j];
      s += matrix[a + j] * value;
      t += matrix[b + j] * value;
      u += matrix[c + j] * value;
      v += matrix[d + j] * value;
    }
    const to = i * outputs;
    y[to + r] = s;
    if (r + 1 < outputs) y[to + r + 1] = t;
    if (r + 2 < outputs) y[to + r + 2] = u;
    if (r + 3 < outputs) y[to + r + 3] = v;
  }
}

function added(x, y, times = 1) { return x.map((value, at) => value + times * y[at]); }

// RMS norms of as many values at a time as there are gains; with the mean subtracted it is LayerNorm.
function normed(x, gains, eps, meanSubtracted = false) {
  const [y, size] = [new Float32Array(x.length), gains.length];
  for (let from = 0; from < x.length; from += size) {
    const row = x.subarray(from, from + size);
    const mean = meanSubtracted ? row.reduce((a, b) => a + b, 0) / size : 0;
    let squares = 0;
    for (let j = 0; j < size; j++) squares += (row[j] - mean) * (row[j] - mean);
    const factor = fround(1 / Math.sqrt(fround(squares / size) + eps));
    for (let j = 0; j < size; j++) y[from + j] = fround((row[j] - mean) * factor) * gains[j];
  }
  return y;
}

// How RoPE turns: pairs, by what a pair turns less than the one before it, and what angles are multiplied by.
function turnsOf(shape, how, factors) {
  const rotated = how.partlyRotated ? shape.rotated / 2 : shape.rotated;
  const [base, scale] = [how.ropeBase || shape.base, shape.scale * (how.ropeScale || 1)];
  return { pairs: rotated / 2, ratio: fround(base ** (-2 / rotated)), scale: fround(1 / scale), factors };
}

function anglesOf(position, { pairs, ratio, scale, factors }) {
  let angle = position;
  return Float32Array.from({ length: pairs }, (_, j) => {
    const turned = fround(scale * fround(factors ? angle / factors[j] : angle));
    angle = fround(angle * ratio);
    return turned;
  });
}

function rotate(x, n, start, dim, turns, inHalves) { // n rows of heads, in place
  const [width, { pairs }] = [x.length / n, turns];
  for (let i = 0; i < n; i++) {
    const angles = anglesOf(start + i, turns);
    for (let j = 0; j < pairs; j++) {
      const cos = fround(Math.cos(angles[j]));
      const sin = fround(Math.sin(angles[j]));
      const first = inHalves ? j : 2 * j;
      const apart = inHalves ? pairs : 1;
      for (let a = i * width + first; a < (i + 1) * width; a += dim) {
        const p = x[a];
        const q = x[a + apart];
        x[a] = p * cos - q * sin;
        x[a + apart] = p * sin + q * cos;
      }
    }
  }
}

// Which keys the query at a position sees: [from, to).
function seen(position, count, how) {
  const from = how.window ? Math.max(0, position - how.window + 1) : 0;
  if (how.seesNext) return [from, Math.min(count, position + 2)];
  return [from, how.notItself ? Math.max(1, position) : position + 1];
}

function attend(q, keys, values, start, { heads, kvHeads, dim }, how, round) {
  const n = q.length / (heads * dim);
  const y = new Float32Array(q.length);
  const scale = how.scaleMissing ? 1 : fround(1 / Math.sqrt(dim));
  round(q);
  for (let i = 0; i < n; i++) {
    const [from, to] = seen(start + i, start + n, how);
    for (let h = 0; h < heads; h++) {
      const shared = how.headsByModulo ? h % kvHeads : Math.floor(h / (heads / kvHeads));
      const at = (i * heads + h) * dim;
      const shares = softmax(scores(q, at, keys, from, to, shared * dim, kvHeads * dim, dim, scale));
      round(shares);
      mix(y, at, shares, values, from, shared * dim, kvHeads * dim, dim);
    }
  }
  return y;
}

function scores(q, at, keys, from, to, first, step, dim, scale) {
  const all = new Float32Array(to - from);
  for (let t = from; t < to; t++) {
    let sum = 0;
    for (let d = 0, key = t * step + first; d < dim; d++) sum += q[at + d] * keys[key + d];
    all[t - from] = fround(sum) * scale;
  }
  return all;
}

function softmax(x) {
  const largest = x.reduce((a, b) => Math.max(a, b), -Infinity);
  let total = 0;
  for (let i = 0; i < x.length; i++) {
    x[i] = Math.exp(fround(x[i] - largest));
    total += x[i];
  }
  for (let i = 0; i < x.length; i++) x[i] *= fround(1 / total);
  return x;
}

function mix(y, at, shares, values, from, first, step, dim) {
  for (let d = 0; d < dim; d++) {
    let sum = 0;
    for (let t = 0; t < shares.length; t++) sum += shares[t] * values[(from + t) * step + first + d];
    y[at + d] = sum;
  }
}

const ACTIVATIONS = {
  silu: (x) => x / (1 + Math.exp(-x)),
  gelu: (x) => x / 2 * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3))),
};

function gated(gate, up, activation = 'silu') {
  const active = ACTIVATIONS[activation];
  return gate.map((value, at) => fround(active(value)) * up[at]);
}

module.exports = { product, added, normed, turnsOf, rotate, attend, gated };
