// From logits to log-probabilities, the likeliest tokens, and the next one.
'use strict';

function logProbabilities(logits) {
  const largest = logits.reduce((a, b) => Math.max(a, b), -Infinity);
  const total = logits.reduce((sum, value) => sum + Math.exp(value - largest), 0);
  return Float32Array.from(logits, (value) => value - largest - Math.log(total));
}

function ordered(values) { return Array.from(values.keys()).sort((a, b) => values[b] - values[a] || a - b); }

// Ids, the likeliest first, up to the one with which their share reaches topP.
function nucleus(ids, x, topP) {
  const powers = ids.map((id) => Math.exp(x[id] - x[ids[0]]));
  const enough = topP * powers.reduce((a, b) => a + b, 0);
  let sum = 0;
  const last = powers.findIndex((power) => { sum += power; return sum >= enough; });
  return last < 0 ? ids : ids.slice(0, last + 1);
}

// Logits after what servers do before they sample, in llama.cpp's order; what is cut is -Infinity.
function sampled(logits, before, { temperature, topK, topP, minP, repeatPenalty }) {
  const x = Float32Array.from(logits);
  for (const id of new Set(before.slice(-64))) x[id] = x[id] > 0 ? x[id] / repeatPenalty : x[id] * repeatPenalty;
  const most = temperature <= 0 ? 1 : topK;
  const likely = nucleus(most > 0 ? ordered(x).slice(0, most) : ordered(x), x, topP);
  const left = new Float32Array(x.length).fill(-Infinity);
  for (const id of likely) {
    if (Math.exp(x[id] - x[likely[0]]) >= minP) left[id] = temperature > 0 ? x[id] / temperature : x[id];
  }
  return left;
}

function random(seed) { // mulberry32
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let x = Math.imul(state ^ (state >>> 15), state | 1);
    x ^= x + Math.imul(x ^ (x >>> 7), x | 61);
    return ((x ^ (x >>> 14)) >>> 0) / 2 ** 32;
  };
}

function chosen(logs, next) {
  let left = next();
  for (const id of ordered(logs)) {
    left -= Math.exp(logs[id]);
    if (left <= 0) return id;
  }
  return ordered(logs)[0];
}

module.exports = { logProbabilities, ordered, sampled, random, chosen };
