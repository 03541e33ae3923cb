// A llama-like model: the logits of a prompt. What it computed of the last prompt is kept, and used again for the
// part that the next one has in common with it. `how` says what is done otherwise (mistakes.js).
'use strict';
const { tensorOf } = require('./gguf');
const { TYPES, ROUND, OPERANDS } = require('./blocks');
const maths = require('./maths');

const HALVES_ROTATED = { llama: false, qwen2: true, qwen3: true };
const MATRICES = ['attn_q', 'attn_k', 'attn_v', 'attn_output', 'ffn_gate', 'ffn_up', 'ffn_down'];
const VECTORS = ['attn_norm', 'ffn_norm', 'attn_q_norm', 'attn_k_norm'];
const BIASES = ['attn_q', 'attn_k', 'attn_v', 'attn_output'];

function shapeOf(file) {
  const arch = file.keys.get('general.architecture');
  const known = Object.keys(HALVES_ROTATED);
  if (!known.includes(arch)) throw new Error(`architecture ${arch}: this server has ${known.join(', ')}`);
  const key = (name) => file.keys.get(`${arch}.${name}`); // a key that is 0 is not set
  const [width, heads] = [key('embedding_length'), key('attention.head_count')];
  const dim = key('attention.key_length') || width / heads;
  return {
    arch, width, heads, dim, kvHeads: key('attention.head_count_kv') || heads, layers: key('block_count'),
    context: key('context_length') || 512, eps: key('attention.layer_norm_rms_epsilon'),
    rotated: key('rope.dimension_count') || dim, base: key('rope.freq_base') || 10000, inHalves: HALVES_ROTATED[arch],
    scale: key('rope.scaling.type') === 'linear' ? key('rope.scaling.factor') || 1 : 1,
  };
}

function readLayer(file, i, how) {
  const layer = {};
  MATRICES.forEach((name) => {
    layer[name] = needed(tensorOf(file, `blk.${i}.${name}.weight`), `blk.${i}.${name}.weight`);
    if (how.requantized) requantize(layer[name]);
  });
  VECTORS.forEach((name) => { layer[name] = valuesOf(file, `blk.${i}.${name}.weight`); });
  BIASES.forEach((name) => { layer[name].bias = valuesOf(file, `blk.${i}.${name}.bias`); });
  if (how.gateUpSwapped) [layer.ffn_gate, layer.ffn_up] = [layer.ffn_up, layer.ffn_gate];
  return layer;
}

function needed(tensor, name) {
  if (!tensor) throw new Error(`the file has no ${name}`);
  return tensor;
}

function requantize(matrix) {
  ROUND.q4_0(matrix.values);
  matrix.type = TYPES.Q4_0;
}

function valuesOf(file, name) {
  const tensor = tensorOf(file, name);
  return tensor && tensor.values;
}

class Model {
  constructor(file, how, { cache = 'f16', exact = false } = {}) {
    this.how = how;
    this.exact = exact;
    this.shape = shapeOf(file);
    this.cacheType = how.cache || cache;
    this.embeddings = tensorOf(file, 'token_embd.weight');
    this.vocabulary = this.embeddings.values.length / this.shape.width;
    this.layers = Array.from({ length: this.shape.layers }, (_, i) => readLayer(file, i, how));
    this.lastNorm = valuesOf(file, 'output_norm.weight');
    this.head = tensorOf(file, 'output.weight') || this.embeddings;
    this.turns = maths.turnsOf(this.shape, how, valuesOf(file, 'rope_freqs.weight'));
    this.forget();
  }

  forget() {
    const { width, kvHeads, dim } = this.shape;
    const rows = (each) => ({ each, values: new Float32Array(0) });
    this.done = []; // the ids that the rows are of
    this.states = rows(width);
    this.keys = this.layers.map(() => rows(kvHeads * dim));
    this.values = this.layers.map(() => rows(kvHeads * dim));
  }

  // The logits after each of the positions; of the last token's where none are given.
  logits(ids, positions = [ids.length - 1]) {
    this.computed(ids);
    const { width } = this.shape;
    return positions.map((i) => this.fromState(this.states.values.slice(i * width, (i + 1) * width)));
  }

  fromState(state) {
    const x = this.how.outputNormMissing ? state : this.normed(state, this.lastNorm);
    const logits = this.product(this.head, x);
    const cap = this.how.softcap;
    return cap ? logits.map((value) => cap * Math.tanh(value / cap)) : logits;
  }

  computed(ids) {
    let same = 0;
    while (same < ids.length && ids[same] === this.done[same]) same++;
    if (this.how.seesNext) same = 0; // what a token saw was the next one: it is computed anew
    if (same < ids.length) {
      this.done.length = same;
      this.run(ids.slice(same), same);
      this.done.push(...ids.slice(same));
    }
  }

  run(ids, start) {
    let x = this.embedded(ids);
    const used = this.layers.length - (this.how.lastLayerSkipped ? 1 : 0);
    for (let i = 0; i < used; i++) x = this.layer(i, x, start);
    keep(this.states, start, x);
  }

  embedded(ids) {
    const { width } = this.shape;
    const x = new Float32Array(ids.length * width);
    ids.forEach((id, i) => x.set(this.embeddings.values.subarray(id * width, (id + 1) * width), i * width));
    return this.how.embeddingsScaled ? x.map((value) => value * Math.sqrt(width)) : x;
  }

  layer(i, x, start) {
    const w = this.layers[i];
    const attended = this.attention(i, this.normed(x, w.attn_norm), start);
    const twice = this.how.residualTwice === i ? 2 : 1;
    const middle = maths.added(attended, x, twice);
    const active = this.feedForward(w, this.how.ffnNormMissing ? middle : this.normed(middle, w.ffn_norm));
    return this.how.ffnResidualMissing === i ? active : maths.added(active, middle);
  }

  attention(i, x, start) {
    const [w, { dim }] = [this.layers[i], this.shape];
    const headNormed = (y, gains) => (gains ? this.normed(y, gains) : y);
    const q = headNormed(this.product(w.attn_q, x), w.attn_q_norm);
    const k = headNormed(this.product(w.attn_k, x), w.attn_k_norm);
    const v = this.product(w.attn_v, x);
    const rotate = (y, from) => maths.rotate(y, x.length / this.shape.width, from, dim, this.turns, this.inHalves);
    rotate(q, start + (this.how.queryAhead || 0));
    rotate(k, start);
    if (this.how.ropeOnV) rotate(v, start);
    [k, v].forEach(ROUND[this.cacheType]);
    keep(this.keys[i], start, k);
    keep(this.values[i], start, v);
    const mixed = maths.attend(q, this.keys[i].values, this.values[i].values, start, this.shape, this.how, this.halves);
    return this.product(w.attn_output, mixed);
  }

  get inHalves() { return this.shape.inHalves !== Boolean(this.how.otherLayout); }

  // Where a cache of float16 is multiplied, the other side is rounded to it, too.
  get halves() { return !this.exact && this.cacheType === 'f16' ? ROUND.f16 : ROUND.f32; }

  feedForward(w, x) {
    const [gate, up] = [this.product(w.ffn_gate, x), this.product(w.ffn_up, x)];
    return this.product(w.ffn_down, maths.gated(gate, up, this.how.activation));
  }

  normed(x, gains) { return maths.normed(x, gains, this.how.eps || this.shape.eps, this.how.meanSubtracted); }

  product(matrix, x) {
    let operand = x;
    if (!this.exact) ROUND[OPERANDS[matrix.type]](operand = x.slice());
    return maths.product(matrix.values, operand, matrix.width, matrix.bias);
  }
}

// Puts rows into a store from one row on, and makes room for them.
function keep(store, start, x) {
  const needed = start * store.each + x.length;
  if (store.values.length < needed) {
    const larger = new Float32Array(2 * needed);
    larger.set(store.values);
    store.values = larger;
  }
  store.values.set(x, start * store.each);
}

module.exports = { Model };
