#!/usr/bin/env node
// A stranger in JavaScript that runs one token after the other, with a KV cache, and writes nothing of what it computes.
//
//     node stepwise.mjs MODEL [MISTAKE]       (MODEL's format: tests/proof/strangers/programs.py)
import { readFileSync } from 'node:fs'

const [path, mistake = ''] = process.argv.slice(2)
if (!path) throw new Error('usage: node stepwise.mjs MODEL [MISTAKE]')
const is = (name) => mistake === name

class Reader {
  #bytes; #at = 0
  constructor(file) {
    this.#bytes = new Uint8Array(readFileSync(file)).buffer
  }
  ints(n) { return this.#take(Int32Array, n) }
  floats(n) { return this.#take(Float32Array, n) }
  get ended() { return this.#at >= this.#bytes.byteLength }
  #take(Kind, n) {
    const view = new Kind(this.#bytes, this.#at, n)
    this.#at += view.byteLength
    return view
  }
}

// y = W x, of a matrix [out, in]
function matvec(y, w, x, transposed = false) {
  const n = x.length, m = y.length
  for (let r = 0; r < m; r++) {
    let sum = 0
    if (transposed) for (let c = 0; c < n; c++) sum += w[c * m + r] * x[c]
    else for (let c = 0; c < n; c++) sum += w[r * n + c] * x[c]
    y[r] = sum
  }
}

const rmsnorm = (out, x, gain, eps) => {
  let squares = 0
  for (const v of x) squares += v * v
  const scale = 1 / Math.sqrt(squares / x.length + eps)
  for (let i = 0; i < x.length; i++) out[i] = is('norm-gain') ? x[i] * scale + gain[i] : x[i] * scale * gain[i]
}

const sigmoid = (v) => 1 / (1 + Math.exp(-v))
const gelu = (v) => 0.5 * v * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (v + 0.044715 * v ** 3)))

class Model {
  #cache = []
  constructor(file) {
    const r = new Reader(file)
    const [layers, embd, heads, kvHeads, dim, ff, vocab, pairs, bias, headNorm, n] = r.ints(11)
    Object.assign(this, { embd, heads, kvHeads, dim, ff, vocab, pairs })
    if (bias || headNorm) throw new Error('no biases and no norms of heads are known here')
    ;[this.eps, this.base] = r.floats(2)
    this.tokens = Array.from(r.ints(n))
    this.table = r.floats(vocab * embd)
    const [q, kv] = [heads * dim, kvHeads * dim]
    this.layers = Array.from({ length: layers }, () => ({
      attnNorm: r.floats(embd), wq: r.floats(q * embd), wk: r.floats(kv * embd), wv: r.floats(kv * embd),
      wo: r.floats(embd * q), ffnNorm: r.floats(embd), gate: r.floats(ff * embd), up: r.floats(ff * embd),
      down: r.floats(embd * ff),
    }))
    this.lastNorm = r.floats(embd)
    this.head = r.ended ? this.table : r.floats(vocab * embd)
    for (const _ of this.layers) this.#cache.push({ k: new Float32Array(n * kv), v: new Float32Array(n * kv) })
    const f = (size) => new Float32Array(size)
    this.state = {
      x: f(embd), xb: f(embd), q: f(q), att: f(n), mix: f(q), gate: f(ff), up: f(ff), logits: f(vocab),
    }
  }

  rotate(row, pos) {
    const { dim, pairs } = this, half = dim / 2
    const base = is('rope-base') ? this.base * 10 : this.base
    for (let h = 0; h < row.length; h += dim) {
      for (let i = 0; i < half; i++) {
        const angle = (is('rope-position') ? pos + 1 : pos) * base ** (-i / half)
        const [c, s] = [Math.cos(angle), is('rope-sign') ? -Math.sin(angle) : Math.sin(angle)]
        const [a, b] = pairs ? [h + 2 * i, h + 2 * i + 1] : [h + i, h + i + half]
        const [u, v] = [row[a], row[b]]
        row[a] = u * c - v * s
        row[b] = u * s + v * c
      }
    }
  }

  attend(layer, pos) {
    const { q, att, mix } = this.state, { heads, kvHeads, dim } = this, { k, v } = this.#cache[layer]
    const wide = kvHeads * dim, scale = is('scale') ? 1 / dim : 1 / Math.sqrt(dim)
    mix.fill(0)
    for (let h = 0; h < heads; h++) {
      const g = is('heads-modulo') ? h % kvHeads : Math.floor(h / (heads / kvHeads))
      const first = is('window') && pos > 3 ? pos - 3 : 0
      const end = is('mask') && pos > 0 ? pos - 1 : pos
      const query = q.subarray(h * dim, (h + 1) * dim)
      let most = -Infinity
      for (let t = first; t <= end; t++) {
        const key = k.subarray(t * wide + g * dim, t * wide + (g + 1) * dim)
        att[t] = key.reduce((sum, value, i) => sum + value * query[i], 0) * scale
        most = Math.max(most, att[t])
      }
      let total = 0
      for (let t = first; t <= end; t++) total += att[t] = Math.exp(att[t] - most)
      for (let t = first; t <= end; t++) {
        const value = v.subarray(t * wide + g * dim)
        for (let i = 0; i < dim; i++) mix[h * dim + i] += att[t] / total * value[i]
      }
    }
    return mix
  }

  forward(token, pos) {
    const s = this.state, { embd, kvHeads, dim, eps } = this
    s.x.set(this.table.subarray(token * embd, (token + 1) * embd))
    this.layers.forEach((w, layer) => {
      rmsnorm(s.xb, s.x, w.attnNorm, is('eps') ? 1e-2 : eps)
      const wide = kvHeads * dim
      const k = this.#cache[layer].k.subarray(pos * wide, (pos + 1) * wide)
      const v = this.#cache[layer].v.subarray(pos * wide, (pos + 1) * wide)
      matvec(s.q, w.wq, s.xb, is('transposed'))
      matvec(k, w.wk, s.xb)
      matvec(v, is('swapped') ? w.wk : w.wv, s.xb)
      this.rotate(s.q, pos)
      if (!is('keys-not-rotated')) this.rotate(k, pos)
      matvec(s.xb, w.wo, this.attend(layer, pos))
      for (let i = 0; i < embd; i++) s.x[i] += is('no-residual') && layer ? 0 : s.xb[i]
      rmsnorm(s.xb, s.x, w.ffnNorm, eps)
      matvec(s.gate, w.gate, s.xb)
      matvec(s.up, w.up, s.xb)
      for (let i = 0; i < s.gate.length; i++) {
        const v = s.gate[i]
        s.gate[i] = (is('gelu') ? gelu(v) : v * sigmoid(v)) * s.up[i]
      }
      matvec(s.xb, w.down, s.gate)
      for (let i = 0; i < embd; i++) s.x[i] = is('residual-lost') ? s.xb[i] : s.x[i] + s.xb[i]
    })
    rmsnorm(s.x, s.x, this.lastNorm, eps)
    matvec(s.logits, this.head, s.x)
    if (is('logits-scaled')) s.logits.forEach((v, i) => { s.logits[i] = v / 2 })
    return s.logits
  }
}

const model = new Model(path)
let logits
model.tokens.forEach((token, pos) => { logits = model.forward(token, pos) })
console.log(logits.indexOf(Math.max(...logits)))
