//! A stranger that takes all tokens at once, row by row through slices and iterators: float32, products in
//! tiles of tokens or in two threads, its own power of e in SwiGLU. A mistake can be asked for by its name.
//!
//!     rows MODEL DUMP [MISTAKE]          (formats: tests/proof/strangers/programs.py)

use std::{env, fs, iter, process::exit, thread};

const TILE: usize = 8; // tokens that share one pass over a matrix
const BLOCK: usize = 128; // columns of the down projection that are summed at a time
const MISTAKES: [&str; 10] = [
    "skip-after-step", "chunks-exact", "zip-shorter", "reversed-keys", "fold-start", "exclusive-range",
    "split-at", "skip-one", "saturating-cast", "not-cleared"];

struct Engine {
    tokens: usize, heads: usize, kv_heads: usize, dim: usize,
    pairs: bool,
    eps: f32,
    turns: Vec<(f32, f32)>, // cosine and sine: [token][dim / 2]
    slip: String, // the mistake, or nothing
    place: String, // what ends the names of taps
    dump: Vec<u8>,
}

fn words<T>(bytes: &mut &[u8], count: usize, from: fn([u8; 4]) -> T) -> Vec<T> {
    let (taken, rest) = bytes.split_at(4 * count);
    *bytes = rest;
    taken.chunks_exact(4).map(|word| from(word.try_into().unwrap())).collect()
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Adds one row, or nothing, to each row of x.
fn add(x: &mut [f32], y: &[f32]) {
    x.iter_mut().zip(y.iter().cycle()).for_each(|(x, y)| *x += y);
}

fn product(matrix: &[f32], columns: usize, x: &[f32]) -> Vec<f32> {
    in_tiles(matrix, columns, x.chunks(TILE * columns), x.len() / columns)
}

/// Each row of the matrix is read once for a tile of tokens.
fn in_tiles<'a>(matrix: &[f32], columns: usize, x: impl Iterator<Item = &'a [f32]>, n: usize) -> Vec<f32> {
    let rows = matrix.len() / columns;
    let mut out = vec![0.0; n * rows];
    for (out, tile) in out.chunks_mut(TILE * rows).zip(x) {
        for (r, weights) in matrix.chunks(columns).enumerate() {
            for (out, x) in out.chunks_mut(rows).zip(tile.chunks(columns)) {
                out[r] = dot(weights, x);
            }
        }
    }
    out
}

impl Engine {
    /// Records values, of whose shape the last size is not given, and gives them back.
    fn tap(&mut self, name: &str, shape: &[usize], values: Vec<f32>) -> Vec<f32> {
        let sizes: String = shape.iter().map(|size| format!("{size} ")).collect();
        let last = values.len() / shape.iter().product::<usize>();
        self.dump.extend(format!("{name}{} {sizes}{last}\n", self.place).bytes());
        self.dump.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        values
    }

    fn norm(&self, x: &[f32], weight: &[f32], wrong: bool) -> Vec<f32> {
        x.chunks(weight.len()).flat_map(|row| {
            let even: f32 = row.iter().step_by(2).map(|v| v * v).sum();
            let odd: f32 = match wrong {
                true => row.iter().step_by(2).skip(1).map(|v| v * v).sum(), // mistake: even again, from 2
                false => row.iter().skip(1).step_by(2).map(|v| v * v).sum(),
            };
            let factor = ((even + odd) / row.len() as f32 + self.eps).sqrt().recip();
            row.iter().zip(weight).map(move |(v, w)| v * factor * w)
        }).collect()
    }

    fn rope(&self, q: &mut [f32], k: &mut [f32]) {
        let (dim, half) = (self.dim, self.dim / 2);
        let rows = q.chunks_mut(self.heads * dim).zip(k.chunks_mut(self.kv_heads * dim));
        for ((q, k), turns) in rows.zip(self.turns.chunks(half)) {
            let turn = |head: &mut [f32]| {
                for (i, (cos, sin)) in turns.iter().enumerate() {
                    let (a, b) = if self.pairs { (2 * i, 2 * i + 1) } else { (i, i + half) };
                    (head[a], head[b]) = (head[a] * cos - head[b] * sin, head[a] * sin + head[b] * cos);
                }
            };
            let (q, k) = (q.chunks_mut(dim), k.chunks_mut(dim));
            match self.slip == "zip-shorter" {
                true => q.zip(k).flat_map(|(q, k)| [q, k]).for_each(turn), // mistake: Q has more heads than K
                false => q.chain(k).for_each(turn),
            }
        }
    }

    /// Scores, their softmax (both [head][token][token]) and the mixture of values.
    fn attention(&self, q: &[f32], k: &[f32], v: &[f32]) -> [Vec<f32>; 3] {
        let (dim, scale) = (self.dim, (self.dim as f32).sqrt().recip());
        let (mut scores, mut weights, mut mixed) = (vec![], vec![], vec![0.0; q.len()]);
        for head in 0..self.heads {
            let group = head / (self.heads / self.kv_heads);
            let all = k.chunks(dim).skip(group).step_by(self.kv_heads);
            // mistake: the newest key comes first
            let keys: Vec<_> = if self.slip == "reversed-keys" { all.rev().collect() } else { all.collect() };
            for (t, q) in q.chunks(dim).skip(head).step_by(self.heads).enumerate() {
                let row: Vec<f32> = keys.iter().map(|key| dot(q, key)).collect();
                let most = row[..=t].iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let mut soft: Vec<f32> = row[..=t].iter().map(|s| ((s - most) * scale).exp()).collect();
                let start = if self.slip == "fold-start" { 1.0 } else { 0.0 }; // mistake: the largest twice
                let total = soft.iter().fold(start, |sum, e| sum + e);
                soft.iter_mut().for_each(|e| *e /= total);
                // mistake: .. where ..= was meant, so that a token does not see itself
                let seen = if self.slip == "exclusive-range" { &soft[..t] } else { &soft[..=t] };
                let out = &mut mixed[(t * self.heads + head) * dim..][..dim];
                for (weight, value) in seen.iter().zip(v.chunks(dim).skip(group).step_by(self.kv_heads)) {
                    out.iter_mut().zip(value).for_each(|(out, value)| *out += weight * value);
                }
                scores.extend(row);
                weights.extend(soft.into_iter().chain(iter::repeat(0.0)).take(self.tokens));
            }
        }
        [scores, weights, mixed]
    }

    /// The product for the first half of the tokens in one thread, for the others in a second.
    fn in_two(&self, matrix: &[f32], columns: usize, x: &[f32]) -> Vec<f32> {
        let (half, rows) = (self.tokens / 2, matrix.len() / columns);
        let mut out = vec![0.0; self.tokens * rows];
        let (first, second) = out.split_at_mut(half * rows);
        // mistake: split at the number of a token, not at where its row begins
        let (before, after) = x.split_at(if self.slip == "split-at" { half } else { half * columns });
        thread::scope(|scope| {
            scope.spawn(|| add(first, &product(matrix, columns, before)));
            scope.spawn(|| add(second, &product(matrix, columns, after)));
        });
        out
    }

    /// e^x as 2^y, of which the whole part is written into the exponent's bits.
    fn power(&self, x: f32) -> f32 {
        let y = (x * std::f32::consts::LOG2_E).clamp(-126.0, 127.0);
        // mistake: a negative float becomes 0 as u32
        let whole = if self.slip == "saturating-cast" { y.floor() as u32 as i32 } else { y.floor() as i32 };
        f32::from_bits(((whole + 127) as u32) << 23) * (y - y.floor()).exp2()
    }

    /// The product in blocks of columns, which are summed in one buffer.
    fn in_blocks(&self, matrix: &[f32], columns: usize, x: &[f32]) -> Vec<f32> {
        let (mut out, mut sums) = (vec![], vec![0.0; matrix.len() / columns]);
        for row in x.chunks(columns) {
            if self.slip != "not-cleared" {
                sums.fill(0.0); // mistake: not done, so that the tokens before are still in it
            }
            for (sum, weights) in sums.iter_mut().zip(matrix.chunks(columns)) {
                row.chunks(BLOCK).zip(weights.chunks(BLOCK)).for_each(|(x, w)| *sum += dot(x, w));
            }
            out.extend_from_slice(&sums);
        }
        out
    }

    fn layer(&mut self, number: usize, weights: &[Vec<f32>; 14], x: &mut [f32]) {
        let [attn_norm, wq, wk, wv, bq, bk, bv, q_norm, k_norm, wo, ffn_norm, gate, up, down] = weights;
        let (n, heads, kv_heads, embd) = (self.tokens, self.heads, self.kv_heads, attn_norm.len());
        self.place = format!("-{number}");
        let y = self.tap("attn_norm", &[n], self.norm(x, attn_norm, false));
        let [mut q, mut k, mut v] = [wq, wk, wv].map(|matrix| product(matrix, embd, &y));
        if self.slip == "chunks-exact" {
            v = in_tiles(wv, embd, y.chunks_exact(TILE * embd), n); // mistake: drops the last, smaller tile
        }
        [(&mut q, bq), (&mut k, bk), (&mut v, bv)].into_iter().for_each(|(x, bias)| add(x, bias));
        (q, k) = (self.tap("Qcur_proj", &[n], q), self.tap("Kcur_proj", &[n], k));
        v = self.tap("Vcur_proj", &[n], v);
        if !q_norm.is_empty() {
            q = self.tap("Qcur_normed", &[n, heads], self.norm(&q, q_norm, false));
            k = self.tap("Kcur_normed", &[n, kv_heads], self.norm(&k, k_norm, false));
        }
        self.rope(&mut q, &mut k);
        (q, k) = (self.tap("Qcur_rope", &[n, heads], q), self.tap("Kcur_rope", &[n, kv_heads], k));
        let [scores, soft, mixed] = self.attention(&q, &k, &v);
        self.tap("kq", &[heads, n], scores);
        self.tap("kq_soft_max", &[heads, n], soft);
        let mixed = self.tap("kqv_out", &[n], mixed);
        let out = self.tap("attn_out", &[n], self.in_two(wo, mixed.len() / n, &mixed));
        let skipped = if self.slip == "skip-one" { 1 } else { 0 }; // mistake: each token has the next one's
        x.chunks_mut(embd).zip(out.chunks(embd).skip(skipped)).for_each(|(x, out)| add(x, out));
        self.tap("ffn_inp", &[n], x.to_vec());
        let y = self.tap("ffn_norm", &[n], self.norm(x, ffn_norm, self.slip == "skip-after-step"));
        let gate = self.tap("ffn_gate", &[n], product(gate, embd, &y));
        let up = self.tap("ffn_up", &[n], product(up, embd, &y));
        let gated = gate.iter().zip(&up).map(|(g, u)| g / (1.0 + self.power(-g)) * u).collect();
        let y = self.tap("ffn_swiglu", &[n], gated);
        add(x, &self.tap("ffn_out", &[n], self.in_blocks(down, y.len() / n, &y)));
        self.tap("l_out", &[n], x.to_vec());
    }
}

fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let slip = arguments.get(2).cloned().unwrap_or_default();
    if !(2..=3).contains(&arguments.len()) || arguments.len() == 3 && !MISTAKES.contains(&slip.as_str()) {
        eprintln!("usage: rows MODEL DUMP [MISTAKE]");
        exit(2);
    }
    let file = fs::read(&arguments[0]).expect("the model");
    let rest = &mut &file[..];
    let h: Vec<_> = words(rest, 11, u32::from_le_bytes).iter().map(|&size| size as usize).collect();
    let [layers, embd, heads, kv_heads, dim, ff, vocab, pairs, bias, norm, tokens] = h[..] else { exit(3) };
    let [eps, base] = words(rest, 2, f32::from_le_bytes)[..] else { exit(3) };
    let ids = words(rest, tokens, u32::from_le_bytes);
    let mut floats = |count: usize| words(rest, count, f32::from_le_bytes);
    let (table, q, kv) = (floats(vocab * embd), heads * dim, kv_heads * dim);
    let sizes = [embd, q * embd, kv * embd, kv * embd, bias * q, bias * kv, bias * kv, norm * dim, norm * dim,
        embd * q, embd, ff * embd, ff * embd, embd * ff];
    let net: Vec<[Vec<f32>; 14]> = (0..layers).map(|_| sizes.map(&mut floats)).collect();
    let (output_norm, output) = (floats(embd), floats(vocab * embd));
    let speed = |i: usize| f64::from(base).powf(-2.0 * i as f64 / dim as f64);
    let angles = (0..tokens).flat_map(|t| (0..dim / 2).map(move |i| t as f64 * speed(i)));
    let turns = angles.map(|angle| (angle.cos() as f32, angle.sin() as f32)).collect();
    let (pairs, place, dump) = (pairs == 1, String::new(), vec![]);
    let mut engine = Engine { tokens, heads, kv_heads, dim, pairs, eps, turns, slip, place, dump };
    let rows = ids.iter().flat_map(|&id| &table[id as usize * embd..][..embd]);
    let mut x = engine.tap("embd", &[tokens], rows.copied().collect());
    net.iter().enumerate().for_each(|(number, weights)| engine.layer(number, weights, &mut x));
    engine.place.clear();
    let x = engine.tap("result_norm", &[tokens], engine.norm(&x, &output_norm, false));
    engine.tap("result_output", &[tokens], product(&output, embd, &x));
    fs::write(&arguments[1], &engine.dump).expect("the dump");
}
