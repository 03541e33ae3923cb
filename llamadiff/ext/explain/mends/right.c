// Each op as it should be, in C. A section for each kind of op, under its own line.
#include <math.h>
#include <stdint.h>
#include <string.h>

// -- rope
// x: one head. Pairs (2i, 2i+1), as llama's files need; else halves (i, i + n_rot/2), as most others.
void rope(float *x, int position, int n_rot, float base, int pairs) {
    for (int i = 0; i < n_rot / 2; i++) {  // what lies beyond n_rot is not rotated
        double theta = position * pow(base, -2.0 * i / n_rot);  // position counts from 0, decoding too
        float c = (float) cos(theta), s = (float) sin(theta);
        float *a = x + (pairs ? 2 * i : i), *b = pairs ? a + 1 : a + n_rot / 2;
        float before = *a;
        *a = before * c - *b * s;
        *b = before * s + *b * c;
    }
}

// -- norms
// Epsilon inside the root, nothing subtracted, times the norm's own weight, once.
void rms_norm(float *y, const float *x, const float *weight, int n, float eps) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += (double) x[i] * x[i];
    float scale = (float) (1 / sqrt(sum / n + eps));
    for (int i = 0; i < n; i++) y[i] = x[i] * scale * weight[i];
}

// -- softmax
// The scores of one query: scaled by 1/sqrt(head size), masked, and only then exp; over the keys.
void causal_softmax(float *s, int n_keys, float scale, int position) {
    float most = -INFINITY, sum = 0;
    for (int k = 0; k < n_keys; k++) {
        s[k] = k > position ? -INFINITY : s[k] * scale;  // a query sees its own key
        if (s[k] > most) most = s[k];
    }
    for (int k = 0; k < n_keys; k++) sum += s[k] = expf(s[k] - most);  // most is taken off, or exp overflows
    for (int k = 0; k < n_keys; k++) s[k] /= sum;
}

// -- attention
// One query q [head][dim]; k and v [key][kv_head][dim]; s: room for n_keys. Head h reads KV head h / group.
void attend(float *out, const float *q, const float *k, const float *v, float *s, int heads, int kv_heads, int dim,
            int n_keys, int position) {
    for (int h = 0; h < heads; h++) {
        int kv = h / (heads / kv_heads);  // not h % kv_heads
        for (int t = 0; t < n_keys; t++) {
            s[t] = 0;
            for (int d = 0; d < dim; d++) s[t] += q[h * dim + d] * k[(t * kv_heads + kv) * dim + d];
        }
        causal_softmax(s, n_keys, 1 / sqrtf((float) dim), position);
        for (int d = 0; d < dim; d++) {
            out[h * dim + d] = 0;
            for (int t = 0; t < n_keys; t++) out[h * dim + d] += s[t] * v[(t * kv_heads + kv) * dim + d];
        }
    }
}

// -- cache
// cache [position][n]: a row goes to its position; attention reads up to and with it -> how many keys.
// K is kept after RoPE and never rotated again; each layer has a cache of its own.
int remember(float *cache, const float *row, int n, int position) {
    memcpy(cache + (size_t) position * n, row, n * sizeof(float));
    return position + 1;
}

// -- matmul
// weight [n_out][n_in] as the file has its rows: ggml's ne is [n_in, n_out].
void linear(float *y, const float *x, const float *weight, const float *bias, int n_in, int n_out) {
    for (int o = 0; o < n_out; o++) {
        float sum = bias ? bias[o] : 0;
        for (int i = 0; i < n_in; i++) sum += weight[(size_t) o * n_in + i] * x[i];
        y[o] = sum;
    }
}

// -- activations
// silu(gate) * up: ffn_gate goes through the activation, ffn_up does not.
void swiglu(float *y, const float *gate, const float *up, int n) {
    for (int i = 0; i < n; i++) y[i] = gate[i] / (1 + expf(-gate[i])) * up[i];
}

// -- residuals
// The residual is x as it was before its norm: ffn_inp = x + attn_out, l_out = ffn_inp + ffn_out.
void add(float *x, const float *branch, int n) {
    for (int i = 0; i < n; i++) x[i] += branch[i];
}

// -- embedding
// table [vocab][n]: one row a token id; ids count from 0.
void embed(float *x, const float *table, int token, int n) {
    memcpy(x, table + (size_t) token * n, n * sizeof(float));
}

// -- heads
// What eh_proj multiplies: a token's embedding, then the hidden state of the token before it, each after its norm.
// hidden [token][n], as the trunk gives it; the first token has none before it, and takes zeros.
void join(float *x, const float *embedding, const float *hidden, int token, int n) {
    memcpy(x, embedding, n * sizeof(float));
    memset(x + n, 0, n * sizeof(float));
    if (token > 0) memcpy(x + n, hidden + (size_t) (token - 1) * n, n * sizeof(float));
}

// -- misread
static float from_half(const uint8_t *bytes) {
    uint16_t h = (uint16_t) (bytes[0] | bytes[1] << 8);
    int exponent = h >> 10 & 31, fraction = h & 1023;
    float size = exponent ? ldexpf(1024 + fraction, exponent - 25) : ldexpf(fraction, -24);
    return h >> 15 ? -size : size;  // no infinities in a file that is right
}

// 18 bytes: a float16 scale, then 16 bytes; their low halves are values 0 to 15, their high halves 16 to 31.
void decode_q4_0(float *y, const uint8_t *block) {
    float d = from_half(block);
    for (int i = 0; i < 16; i++) {
        y[i] = d * ((block[2 + i] & 15) - 8);
        y[i + 16] = d * ((block[2 + i] >> 4) - 8);
    }
}

// 144 bytes: float16 d and dmin, 12 bytes with 8 scales and 8 minima of 6 bits, 128 bytes of halves.
void decode_q4_k(float *y, const uint8_t *block) {
    float d = from_half(block), dmin = from_half(block + 2);
    const uint8_t *s = block + 4, *q = block + 16;
    for (int j = 0; j < 8; j++) {
        int scale = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
        int minimum = j < 4 ? s[j + 4] & 63 : (s[j + 4] >> 4) | (s[j] >> 6) << 4;
        for (int i = 0; i < 32; i++) {  // 32 low halves, then their 32 high halves
            int value = j % 2 ? q[j / 2 * 32 + i] >> 4 : q[j / 2 * 32 + i] & 15;
            y[j * 32 + i] = d * scale * value - dmin * minimum;
        }
    }
}

// -- moe
// Softmax over all experts (in place), the n_used largest, and their weights divided by their sum.
void route(int *chosen, float *weights, float *logits, int n_experts, int n_used) {
    float sum = 0;
    causal_softmax(logits, n_experts, 1, n_experts);
    for (int k = 0; k < n_used; k++) {
        int best = -1;
        for (int e = 0; e < n_experts; e++) {
            int taken = 0;
            for (int i = 0; i < k; i++) taken |= chosen[i] == e;
            if (!taken && (best < 0 || logits[e] > logits[best])) best = e;
        }
        chosen[k] = best;
        sum += weights[k] = logits[best];
    }
    for (int k = 0; k < n_used; k++) weights[k] /= sum;
}

// -- recurrent
// One token: state [n - 1][channels], the tokens before it, oldest first; weight [channels][n].
void convolve(float *y, float *state, const float *x, const float *weight, int channels, int n) {
    for (int c = 0; c < channels; c++) {
        y[c] = x[c] * weight[c * n + n - 1];
        for (int j = 0; j < n - 1; j++) y[c] += state[j * channels + c] * weight[c * n + j];
    }
    memmove(state, state + channels, (size_t) (n - 2) * channels * sizeof(float));
    memcpy(state + (size_t) (n - 2) * channels, x, channels * sizeof(float));
}

// -- precision
// float32 rounded to bfloat16, to the nearest, ties to even; sums and norms stay in float32.
float to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000u;
    memcpy(&x, &bits, 4);
    return x;
}
