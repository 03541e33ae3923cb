// Types of weights: blocks of bytes as float32, and what rounding to a type leaves of values.
'use strict';

const TYPES = { F32: 0, F16: 1, Q4_0: 2, Q8_0: 8, Q4_K: 12, Q5_K: 13, Q6_K: 14, BF16: 30 };
const HALVES = new Float32Array(65536).map((_, bits) => halfOf(bits));
const one = new Float32Array(1);
const bitsOfOne = new Uint32Array(one.buffer);

function halfOf(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return exponent ? sign * 2 ** (exponent - 15) * (1 + fraction / 1024) : sign * 2 ** -24 * fraction;
}

// -- from bytes ---------------------------------------------------------------------------------------------

function floats(bytes, start, count) {
  const copy = new Uint8Array(bytes.subarray(start, start + 4 * count));
  return new Float32Array(copy.buffer);
}

function halves(bytes, start, count) {
  const y = new Float32Array(count);
  for (let i = 0; i < count; i++) y[i] = HALVES[bytes[start + 2 * i] | (bytes[start + 2 * i + 1] << 8)];
  return y;
}

function bfloats(bytes, start, count) {
  const bits = Uint32Array.from({ length: count }, (_, i) => bytes.readUInt16LE(start + 2 * i) << 16);
  return new Float32Array(bits.buffer);
}

const half = (bytes, at) => HALVES[bytes.readUInt16LE(at)];

function q4Block(bytes, at, y, to) { // d, 32 times 4 bits: the first half's are low
  const d = half(bytes, at);
  for (let i = 0; i < 16; i++) {
    y[to + i] = d * ((bytes[at + 2 + i] & 15) - 8);
    y[to + 16 + i] = d * ((bytes[at + 2 + i] >> 4) - 8);
  }
}

function q8Block(bytes, at, y, to) {
  const d = half(bytes, at);
  for (let i = 0; i < 32; i++) y[to + i] = d * bytes.readInt8(at + 2 + i);
}

// Of eight groups of 32 each has six bits of scale and six of minimum, in twelve bytes:
//   bytes 0-3: scales 0-3, and above them the high bits of scales 4-7; bytes 4-7: the same of the minima;
//   bytes 8-11: low bits of scales 4-7, and above them those of the minima
function scaleAndMin(bytes, at, group) {
  if (group < 4) return [bytes[at + group] & 63, bytes[at + group + 4] & 63];
  const low = bytes[at + group + 4];
  return [(low & 15) | ((bytes[at + group - 4] >> 6) << 4), (low >> 4) | ((bytes[at + group] >> 6) << 4)];
}

function kBlock(bytes, at, y, to, fifths) { // d, dmin, scales, with five bits: the fifth ones, four bits
  const [d, dmin, low] = [half(bytes, at), half(bytes, at + 2), at + 16 + (fifths ? 32 : 0)];
  for (let group = 0; group < 8; group++) {
    const [scale, min] = scaleAndMin(bytes, at + 4, group);
    for (let i = 0; i < 32; i++) {
      const byte = bytes[low + (group >> 1) * 32 + i];
      const fifth = fifths ? ((bytes[at + 16 + i] >> group) & 1) << 4 : 0;
      y[to + group * 32 + i] = d * scale * ((group & 1 ? byte >> 4 : byte & 15) | fifth) - dmin * min;
    }
  }
}

function q6Block(bytes, at, y, to) { // 128 bytes of low bits, 64 of high ones, 16 scales, d
  const d = half(bytes, at + 208);
  for (let i = 0; i < 256; i++) {
    const quarter = (i >> 5) & 3; // of 128 values
    const low = bytes[at + (i >> 7) * 64 + (quarter & 1) * 32 + (i & 31)];
    const high = (bytes[at + 128 + (i >> 7) * 32 + (i & 31)] >> (2 * quarter)) & 3;
    const scale = (bytes[at + 192 + (i >> 4)] << 24) >> 24; // with its sign
    y[to + i] = d * scale * (((quarter & 2 ? low >> 4 : low & 15) | (high << 4)) - 32);
  }
}

const BLOCKS = { // type -> values, bytes, function
  [TYPES.Q4_0]: [32, 18, q4Block], [TYPES.Q8_0]: [32, 34, q8Block], [TYPES.Q4_K]: [256, 144, kBlock],
  [TYPES.Q5_K]: [256, 176, (bytes, at, y, to) => kBlock(bytes, at, y, to, true)], [TYPES.Q6_K]: [256, 210, q6Block],
};
const PLAIN = { [TYPES.F32]: floats, [TYPES.F16]: halves, [TYPES.BF16]: bfloats };

function decode(bytes, start, type, count) {
  if (PLAIN[type]) return PLAIN[type](bytes, start, count);
  if (!BLOCKS[type]) throw new Error(`weights of type ${type}: this server has no such blocks`);
  const [values, size, block] = BLOCKS[type];
  const y = new Float32Array(count);
  for (let i = 0; i < count / values; i++) block(bytes, start + i * size, y, i * values);
  return y;
}

// -- rounding, in place -------------------------------------------------------------------------------------

function toHalf(x) { // the nearest float16, half to even; below 2^-14 they lie 2^-24 apart
  one[0] = x;
  if (Math.abs(x) < 2 ** -14) return (Math.fround(x * 2 ** 24 + 3 * 2 ** 22) - 3 * 2 ** 22) / 2 ** 24;
  bitsOfOne[0] = (bitsOfOne[0] + 0xfff + ((bitsOfOne[0] >>> 13) & 1)) & ~0x1fff;
  return one[0];
}

function toBrain(x) {
  one[0] = x;
  bitsOfOne[0] = (bitsOfOne[0] + 0x7fff + ((bitsOfOne[0] >>> 16) & 1)) & ~0xffff;
  return one[0];
}

const each = (round) => (x) => { for (let i = 0; i < x.length; i++) x[i] = round(x[i]); };

function largest(x, from, count) { // with its sign
  let found = 0;
  for (let i = from; i < from + count; i++) if (Math.abs(x[i]) > Math.abs(found)) found = x[i];
  return found;
}

const inBlocks = (size, round) => (x) => { for (let at = 0; at < x.length; at += size) round(x, at); };

function toQ8(x, at) {
  const d = Math.abs(largest(x, at, 32)) / 127;
  const kept = toHalf(d);
  for (let i = at; i < at + 32; i++) x[i] = d ? kept * Math.sign(x[i]) * Math.round(Math.abs(x[i]) / d) : 0;
}

function toQ4(x, at) {
  const d = largest(x, at, 32) / -8;
  const kept = toHalf(d);
  for (let i = at; i < at + 32; i++) x[i] = d ? kept * (Math.min(15, Math.floor(x[i] / d + 8.5)) - 8) : 0;
}

function toQ8K(x, at) { // what products with K-quants make of the other side
  const d = largest(x, at, 256) / -127;
  for (let i = at; i < at + 256; i++) x[i] = d ? d * Math.min(127, Math.round(x[i] / d)) : 0;
}

const ROUND = {
  f32: () => {}, f16: each(toHalf), bf16: each(toBrain), q8_0: inBlocks(32, toQ8), q4_0: inBlocks(32, toQ4),
  q8_K: inBlocks(256, toQ8K),
};
// What a product rounds its other side to, by the type of its weights, as llama.cpp does on a CPU.
const OPERANDS = {
  [TYPES.F32]: 'f32', [TYPES.F16]: 'f16', [TYPES.BF16]: 'bf16', [TYPES.Q4_0]: 'q8_0', [TYPES.Q8_0]: 'q8_0',
  [TYPES.Q4_K]: 'q8_K', [TYPES.Q5_K]: 'q8_K', [TYPES.Q6_K]: 'q8_K',
};

module.exports = { TYPES, ROUND, OPERANDS, decode };
