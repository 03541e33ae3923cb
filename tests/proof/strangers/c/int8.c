// A stranger that multiplies whole numbers: weights are the file's Q8_0 blocks, activations are made into such blocks too,
// their scale cut off to float16 where ggml rounds it. QKV is one product, gate and up are rows in turn of another.
//
//     int8 MODEL DUMP          (formats: tests/proof/strangers/programs.py, matrices as Q8_0)
//
// -DBUG_SCALE: the scale of the block before is used for a row's last block; -DBUG_UNSIGNED: activations lose their sign;
// -DBUG_MASK: a token sees the next one's key.
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define QK 32
typedef struct { uint8_t d[2]; int8_t q[QK]; } weight_block;            // as it lies in the file
typedef struct { float d; int8_t q[QK]; } block;                         // of activations
typedef struct { int rows, columns; weight_block *b; } matrix;
typedef struct { float *attn_norm, *bias, *ffn_norm; matrix qkv, out, gate_up, down; } layer;
typedef struct {
    int32_t layers, embd, heads, kv_heads, dim, ff, vocab, pairs, has_bias, has_qk_norm, tokens;
    float eps, base;
} shape;

static FILE *file, *out;
static shape s;

static void fail(const char *why) { fprintf(stderr, "int8: %s\n", why); exit(3); }
static void take(void *to, size_t size) { if (fread(to, 1, size, file) != size) fail("the model is too short"); }
static void *room(size_t size) { void *p = calloc(1, size); if (!p) fail("no memory"); return p; }
static float *floats(size_t count) { float *x = room(count * 4); take(x, count * 4); return x; }

static void tap(const char *word, int l, const float *x, int a, int b, int c)
{
    size_t count = (size_t)a * b * (c ? c : 1);
    l < 0 ? fprintf(out, "%s", word) : fprintf(out, "%s-%d", word, l);
    c ? fprintf(out, " %d %d %d\n", a, b, c) : fprintf(out, " %d %d\n", a, b);
    fwrite(x, 4, count, out);
}

static float from_half(const uint8_t *bytes)
{
    unsigned h = bytes[0] | bytes[1] << 8, e = h >> 10 & 31, m = h & 1023;
    float x = e == 0 ? ldexpf((float)m, -24) : ldexpf((float)(m | 1024), (int)e - 25);
    return h & 32768 ? -x : x;
}

// The largest float16 that is not larger: what is left when the lower bits are dropped.
static float cut_to_half(float x)
{
    int e;
    if (x == 0) return 0;
    frexpf(x, &e);
    int step = e - 11 < -24 ? -24 : e - 11;
    return ldexpf(floorf(ldexpf(x, -step)), step);
}

static void append(matrix *m, int rows, int columns, int first, int every)
{
    int blocks = columns / QK;
    for (int r = 0; r < rows; r++) take(m->b + (size_t)(first + r * every) * blocks, sizeof(weight_block) * blocks);
}

static matrix empty(int rows, int columns)
{
    matrix m = { rows, columns, room((size_t)rows * columns / QK * sizeof(weight_block)) };
    return m;
}

static void quantize(block *b, const float *x, int count)
{
    for (int i = 0; i < count; i += QK, b++, x += QK) {
        float most = 0;
        for (int j = 0; j < QK; j++) most = fmaxf(most, fabsf(x[j]));
        float inverse = most > 0 ? 127.0f / most : 0;
        b->d = cut_to_half(most / 127.0f);
        for (int j = 0; j < QK; j++) b->q[j] = (int8_t)lrintf(x[j] * inverse);
#ifdef BUG_UNSIGNED
        for (int j = 0; j < QK; j++) b->q[j] = (int8_t)abs(b->q[j]);
#endif
    }
}

static void product(float *y, const matrix *m, const float *x, int tokens)
{
    int blocks = m->columns / QK;
    block *a = room(sizeof(block) * blocks);
    for (int t = 0; t < tokens; t++) {
        quantize(a, x + (size_t)t * m->columns, m->columns);
        for (int r = 0; r < m->rows; r++) {
            const weight_block *w = m->b + (size_t)r * blocks;
            float sum = 0;
            for (int i = 0; i < blocks; i++) {
                int32_t whole = 0;
                for (int j = 0; j < QK; j++) whole += a[i].q[j] * w[i].q[j];
#ifdef BUG_SCALE
                sum += (float)whole * (a[i].d * from_half(w[i == blocks - 1 && i > 0 ? i - 1 : i].d));
#else
                sum += (float)whole * (a[i].d * from_half(w[i].d));
#endif
            }
            y[(size_t)t * m->rows + r] = sum;
        }
    }
    free(a);
}

static void norm(float *y, const float *x, const float *w, int rows, int count)
{
    for (int r = 0; r < rows; r++, x += count, y += count) {
        double square = 0;
        for (int i = 0; i < count; i++) square += (double)x[i] * x[i];
        float k = (float)(1 / sqrt(square / count + s.eps));
        for (int i = 0; i < count; i++) y[i] = x[i] * k * w[i];
    }
}

// Part [token, width] of rows that hold more.
static float *part(const float *rows, int tokens, int whole, int start, int width, const float *bias)
{
    float *x = room((size_t)tokens * width * 4);
    for (int t = 0; t < tokens; t++)
        for (int i = 0; i < width; i++)
            x[t * width + i] = rows[(size_t)t * whole + start + i] + (bias ? bias[start + i] : 0);
    return x;
}

static void rope(float *x, int tokens, int heads)
{
    for (int t = 0; t < tokens; t++) {
        double theta = t;
        for (int i = 0; i < s.dim / 2; i++, theta *= pow(s.base, -2.0 / s.dim)) {
            float c = (float)cos(theta), d = (float)sin(theta);
            for (int h = 0; h < heads; h++) {
                float *v = x + ((size_t)t * heads + h) * s.dim;
                int a = s.pairs ? 2 * i : i, b = s.pairs ? 2 * i + 1 : i + s.dim / 2;
                float va = v[a], vb = v[b];
                v[a] = va * c - vb * d;
                v[b] = va * d + vb * c;
            }
        }
    }
}

static void attention(int l, float *mixed, const float *q, const float *k, const float *v)
{
    int n = s.tokens, group = s.heads / s.kv_heads;
    float *scores = room((size_t)s.heads * n * n * 4), *probs = room((size_t)s.heads * n * n * 4);
    float scale = 1 / sqrtf((float)s.dim);
    for (int h = 0; h < s.heads; h++)
        for (int t = 0; t < n; t++) {
            float *row = scores + ((size_t)h * n + t) * n, *p = probs + ((size_t)h * n + t) * n;
            const float *a = q + ((size_t)t * s.heads + h) * s.dim;
            float most = -INFINITY, total = 0;
            int last = t;
#ifdef BUG_MASK
            last = t + 1 < n ? t + 1 : t;
#endif
            for (int u = 0; u < n; u++) {
                const float *b = k + ((size_t)u * s.kv_heads + h / group) * s.dim;
                for (int i = 0; i < s.dim; i++) row[u] += a[i] * b[i];
                if (u <= last) most = fmaxf(most, row[u] * scale);
            }
            for (int u = 0; u <= last; u++) total += p[u] = expf(row[u] * scale - most);
            for (int u = 0; u <= last; u++) {
                const float *b = v + ((size_t)u * s.kv_heads + h / group) * s.dim;
                p[u] /= total;
                for (int i = 0; i < s.dim; i++) mixed[((size_t)t * s.heads + h) * s.dim + i] += p[u] * b[i];
            }
        }
    tap("kq", l, scores, s.heads, n, n);
    tap("kq_soft_max", l, probs, s.heads, n, n);
    free(scores);
    free(probs);
}

static void run(int l, const layer *w, float *x)
{
    int n = s.tokens, nq = s.heads * s.dim, nkv = s.kv_heads * s.dim;
    float *y = room((size_t)n * s.embd * 4), *all = room((size_t)n * (nq + 2 * nkv) * 4);
    float *both = room((size_t)n * 2 * s.ff * 4), *mixed = room((size_t)n * nq * 4);
    norm(y, x, w->attn_norm, n, s.embd);
    tap("attn_norm", l, y, n, s.embd, 0);
    product(all, &w->qkv, y, n);
    float *q = part(all, n, nq + 2 * nkv, 0, nq, w->bias);
    float *k = part(all, n, nq + 2 * nkv, nq, nkv, w->bias);
    float *v = part(all, n, nq + 2 * nkv, nq + nkv, nkv, w->bias);
    tap("Qcur_proj", l, q, n, nq, 0);
    tap("Kcur_proj", l, k, n, nkv, 0);
    tap("Vcur_proj", l, v, n, nkv, 0);
    rope(q, n, s.heads);
    rope(k, n, s.kv_heads);
    tap("Qcur_rope", l, q, n, s.heads, s.dim);
    tap("Kcur_rope", l, k, n, s.kv_heads, s.dim);
    attention(l, mixed, q, k, v);
    tap("kqv_out", l, mixed, n, nq, 0);
    product(y, &w->out, mixed, n);
    tap("attn_out", l, y, n, s.embd, 0);
    for (int i = 0; i < n * s.embd; i++) x[i] += y[i];
    tap("ffn_inp", l, x, n, s.embd, 0);
    norm(y, x, w->ffn_norm, n, s.embd);
    tap("ffn_norm", l, y, n, s.embd, 0);
    product(both, &w->gate_up, y, n);
    float *g = room((size_t)n * s.ff * 4), *u = room((size_t)n * s.ff * 4);
    for (int i = 0; i < n * s.ff; i++) g[i] = both[2 * i], u[i] = both[2 * i + 1];
    tap("ffn_gate", l, g, n, s.ff, 0);
    tap("ffn_up", l, u, n, s.ff, 0);
    for (int i = 0; i < n * s.ff; i++) g[i] = g[i] / (1.0f + expf(-g[i])) * u[i];
    tap("ffn_swiglu", l, g, n, s.ff, 0);
    product(y, &w->down, g, n);
    tap("ffn_out", l, y, n, s.embd, 0);
    for (int i = 0; i < n * s.embd; i++) x[i] += y[i];
    tap("l_out", l, x, n, s.embd, 0);
    free(y), free(all), free(both), free(mixed), free(q), free(k), free(v), free(g), free(u);
}

int main(int argc, char **argv)
{
    if (argc != 3 || !(file = fopen(argv[1], "rb")) || !(out = fopen(argv[2], "wb"))) fail("usage: int8 MODEL DUMP");
    take(&s, sizeof s);
    if (s.has_qk_norm) fail("norms of heads are not known");
    int nq = s.heads * s.dim, nkv = s.kv_heads * s.dim;
    int32_t *ids = room((size_t)s.tokens * 4);
    take(ids, (size_t)s.tokens * 4);
    matrix table = empty(s.vocab, s.embd), head = empty(s.vocab, s.embd);
    append(&table, s.vocab, s.embd, 0, 1);
    layer *net = room(sizeof(layer) * s.layers);
    for (layer *w = net; w < net + s.layers; w++) {
        w->qkv = empty(nq + 2 * nkv, s.embd), w->out = empty(s.embd, nq);
        w->gate_up = empty(2 * s.ff, s.embd), w->down = empty(s.embd, s.ff);
        w->attn_norm = floats(s.embd);
        append(&w->qkv, nq, s.embd, 0, 1), append(&w->qkv, nkv, s.embd, nq, 1), append(&w->qkv, nkv, s.embd, nq + nkv, 1);
        w->bias = s.has_bias ? floats(nq + 2 * nkv) : NULL;
        append(&w->out, s.embd, nq, 0, 1);
        w->ffn_norm = floats(s.embd);
        append(&w->gate_up, s.ff, s.embd, 0, 2), append(&w->gate_up, s.ff, s.embd, 1, 2);
        append(&w->down, s.embd, s.ff, 0, 1);
    }
    float *final = floats(s.embd), *x = room((size_t)s.tokens * s.embd * 4), *y = room((size_t)s.tokens * s.embd * 4);
    float *logits = room((size_t)s.tokens * s.vocab * 4);
    append(&head, s.vocab, s.embd, 0, 1);
    for (int t = 0; t < s.tokens; t++)
        for (int i = 0; i < s.embd; i++) {
            const weight_block *b = table.b + ((size_t)ids[t] * s.embd + i) / QK;
            x[t * s.embd + i] = from_half(b->d) * b->q[i % QK];
        }
    tap("embd", -1, x, s.tokens, s.embd, 0);
    for (int l = 0; l < s.layers; l++) run(l, net + l, x);
    norm(y, x, final, s.tokens, s.embd);
    tap("result_norm", -1, y, s.tokens, s.embd, 0);
    product(logits, &head, y, s.tokens);
    tap("result_output", -1, logits, s.tokens, s.vocab, 0);
    return fclose(out) ? 3 : 0;
}
