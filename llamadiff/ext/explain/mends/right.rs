// Each op as it should be, in Rust. A section for each kind of op, under its own line.

// -- rope
// x: one head. Pairs (2i, 2i+1), as llama's files need; else halves (i, i + n_rot/2), as most others.
pub fn rope(x: &mut [f32], position: usize, n_rot: usize, base: f32, pairs: bool) {
    for i in 0..n_rot / 2 {  // what lies beyond n_rot is not rotated
        let frequency = (base as f64).powf(-2.0 * i as f64 / n_rot as f64);
        let (s, c) = (position as f64 * frequency).sin_cos();  // position counts from 0, decoding too
        let (a, b) = if pairs { (2 * i, 2 * i + 1) } else { (i, i + n_rot / 2) };
        let (first, second) = (x[a], x[b]);
        x[a] = first * c as f32 - second * s as f32;
        x[b] = first * s as f32 + second * c as f32;
    }
}

// -- norms
// Epsilon inside the root, nothing subtracted, times the norm's own weight, once.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let sum: f64 = x.iter().map(|&v| v as f64 * v as f64).sum();
    let scale = 1.0 / (sum / x.len() as f64 + eps as f64).sqrt();
    x.iter().zip(weight).map(|(&v, &w)| v * scale as f32 * w).collect()
}

// -- softmax
// The scores of one query: scaled by 1/sqrt(head size), masked, and only then exp; over the keys.
pub fn causal_softmax(scores: &mut [f32], scale: f32, position: usize) {
    for (key, s) in scores.iter_mut().enumerate() {
        *s = if key > position { f32::NEG_INFINITY } else { *s * scale };  // a query sees its own key
    }
    let most = scores.iter().cloned().fold(f32::NEG_INFINITY, f32::max);
    scores.iter_mut().for_each(|s| *s = (*s - most).exp());  // most is taken off, or exp overflows
    let sum: f32 = scores.iter().sum();
    scores.iter_mut().for_each(|s| *s /= sum);
}

// -- attention
// One query q [head][dim]; k and v [key][kv_head][dim]. Head h reads KV head h / group.
pub fn attend(q: &[f32], k: &[f32], v: &[f32], kv_heads: usize, dim: usize, position: usize) -> Vec<f32> {
    let (heads, n_keys) = (q.len() / dim, k.len() / (kv_heads * dim));
    let mut out = vec![0.0; q.len()];
    for h in 0..heads {
        let row = |key: usize| (key * kv_heads + h / (heads / kv_heads)) * dim;  // not h % kv_heads
        let mut s: Vec<f32> =
            (0..n_keys).map(|key| (0..dim).map(|d| q[h * dim + d] * k[row(key) + d]).sum()).collect();
        causal_softmax(&mut s, 1.0 / (dim as f32).sqrt(), position);
        for d in 0..dim {
            out[h * dim + d] = (0..n_keys).map(|key| s[key] * v[row(key) + d]).sum();
        }
    }
    out
}

// -- cache
// cache [position][n]: a row goes to its position; attention reads up to and with it -> how many keys.
// K is kept after RoPE and never rotated again; each layer has a cache of its own.
pub fn remember(cache: &mut [f32], row: &[f32], position: usize) -> usize {
    cache[position * row.len()..][..row.len()].copy_from_slice(row);
    position + 1
}

// -- matmul
// weight [n_out][n_in] as the file has its rows: ggml's ne is [n_in, n_out].
pub fn linear(x: &[f32], weight: &[f32], bias: Option<&[f32]>) -> Vec<f32> {
    let dot = |row: &[f32]| row.iter().zip(x).map(|(w, v)| w * v).sum::<f32>();
    let rows = weight.chunks_exact(x.len()).enumerate();
    rows.map(|(o, row)| dot(row) + bias.map_or(0.0, |b| b[o])).collect()
}

// -- activations
// silu(gate) * up: ffn_gate goes through the activation, ffn_up does not.
pub fn swiglu(gate: &[f32], up: &[f32]) -> Vec<f32> {
    gate.iter().zip(up).map(|(&g, &u)| g / (1.0 + (-g).exp()) * u).collect()
}

// -- residuals
// The residual is x as it was before its norm: ffn_inp = x + attn_out, l_out = ffn_inp + ffn_out.
pub fn add(x: &mut [f32], branch: &[f32]) {
    x.iter_mut().zip(branch).for_each(|(a, b)| *a += b);
}

// -- embedding
// table [vocab][n]: one row a token id; ids count from 0.
pub fn embed(table: &[f32], token: usize, n: usize) -> &[f32] {
    &table[token * n..][..n]
}

// -- heads
// What eh_proj multiplies: a token's embedding, then the hidden state of the token before it, each after its norm.
// hidden [token][n], as the trunk gives it; the first token has none before it, and takes zeros.
pub fn join(embedding: &[f32], hidden: &[f32], token: usize) -> Vec<f32> {
    let n = embedding.len();
    let before = if token > 0 { hidden[(token - 1) * n..][..n].to_vec() } else { vec![0.0; n] };
    [embedding, &before].concat()
}

// -- misread
fn from_half(bytes: &[u8]) -> f32 {
    let h = u16::from_le_bytes([bytes[0], bytes[1]]);
    let (exponent, fraction) = ((h >> 10 & 31) as i32, (h & 1023) as f32);
    let size = if exponent > 0 { (1024.0 + fraction) * 2f32.powi(exponent - 25) } else { fraction * 2f32.powi(-24) };
    if h >> 15 == 1 { -size } else { size }  // no infinities in a file that is right
}

// 18 bytes: a float16 scale, then 16 bytes; their low halves are values 0 to 15, their high halves 16 to 31.
pub fn decode_q4_0(block: &[u8]) -> [f32; 32] {
    let (d, mut y) = (from_half(block), [0.0; 32]);
    for i in 0..16 {
        y[i] = d * ((block[2 + i] & 15) as f32 - 8.0);
        y[i + 16] = d * ((block[2 + i] >> 4) as f32 - 8.0);
    }
    y
}

// 144 bytes: float16 d and dmin, 12 bytes with 8 scales and 8 minima of 6 bits, 128 bytes of halves.
pub fn decode_q4_k(block: &[u8]) -> [f32; 256] {
    let (d, dmin, s, q) = (from_half(block), from_half(&block[2..]), &block[4..16], &block[16..]);
    let mut y = [0.0; 256];
    for j in 0..8 {
        let scale = if j < 4 { s[j] & 63 } else { s[j + 4] & 15 | s[j - 4] >> 6 << 4 };
        let minimum = if j < 4 { s[j + 4] & 63 } else { s[j + 4] >> 4 | s[j] >> 6 << 4 };
        for i in 0..32 {  // 32 low halves, then their 32 high halves
            let byte = q[j / 2 * 32 + i];
            let value = if j % 2 == 1 { byte >> 4 } else { byte & 15 };
            y[j * 32 + i] = d * scale as f32 * value as f32 - dmin * minimum as f32;
        }
    }
    y
}

// -- moe
// Softmax over all experts (in place), the n_used largest, and their weights divided by their sum.
pub fn route(logits: &mut [f32], n_used: usize) -> Vec<(usize, f32)> {
    causal_softmax(logits, 1.0, logits.len());
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    let sum: f32 = order[..n_used].iter().map(|&e| logits[e]).sum();
    order[..n_used].iter().map(|&e| (e, logits[e] / sum)).collect()
}

// -- recurrent
// One token: state [n - 1][channels], the tokens before it, oldest first; weight [channels][n].
pub fn convolve(state: &mut [f32], x: &[f32], weight: &[f32], n: usize) -> Vec<f32> {
    let channels = x.len();
    let before = |c: usize| (0..n - 1).map(|j| state[j * channels + c] * weight[c * n + j]).sum::<f32>();
    let y = (0..channels).map(|c| before(c) + x[c] * weight[c * n + n - 1]).collect();
    state.copy_within(channels.., 0);
    state[(n - 2) * channels..].copy_from_slice(x);
    y
}

// -- precision
// float32 rounded to bfloat16, to the nearest, ties to even; sums and norms stay in float32.
pub fn to_bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    f32::from_bits((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF_0000)
}
