/* A stranger that lays things out its own way: rows of Q and K are un-permuted while they are loaded and heads rotated in
 * halves, the attention scale is in Q, K and V wait transposed and in float16, angles come from a table. What it records
 * of Q and K is in its own order, Q's with the scale.
 *
 *     halves MODEL DUMP         (formats: tests/proof/strangers/programs.py)
 *
 * -DBUG_EPS: epsilon is ten times the file's; -DBUG_GROUP: query heads are dealt out to KV heads in turn;
 * -DBUG_SIGN: RoPE turns the other way. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint16_t half;

struct Config { int32_t n_layer, n_embd, n_head, n_kv, d_head, n_ff, n_vocab, pairs, bias, qk_norm, n_tok; };
struct Config cfg;
float EPS, BASE;

struct Tensor { int rows, cols; float *at; };
struct Block {
    struct Tensor norm1, wq, wk, wv, bq, bk, bv, nq, nk, wo, norm2, gate, up, down;
    half *k_cache, *v_cache; /* [kv head][dim][token] */
};

static FILE *in, *dumped;

static void die(const char *msg) { fprintf(stderr, "halves: %s\n", msg); exit(3); }

static void *grab(size_t bytes)
{
    void *p = calloc(bytes ? bytes : 1, 1);
    if (!p) die("out of memory");
    return p;
}

static struct Tensor load(int rows, int cols)
{
    struct Tensor t = { rows, cols, grab(sizeof(float) * rows * cols) };
    if (fread(t.at, sizeof(float), (size_t)rows * cols, in) != (size_t)rows * cols) die("model ends early");
    return t;
}

/* Rows 2i and 2i+1 of every head go to i and i + d/2. */
static struct Tensor unpermuted(struct Tensor t)
{
    struct Tensor u = { t.rows, t.cols, grab(sizeof(float) * t.rows * t.cols) };
    int d = cfg.d_head;
    if (!cfg.pairs) return t;
    for (int r = 0; r < t.rows; r++) {
        int head = r / d, i = r % d;
        int to = head * d + (i % 2 ? d / 2 + i / 2 : i / 2);
        memcpy(u.at + (size_t)to * t.cols, t.at + (size_t)r * t.cols, sizeof(float) * t.cols);
    }
    return u;
}

/* To the nearest float16, ties to even; values here are far from its limits. */
static half to_half(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size < 0x38800000) { /* subnormal: a whole number of 2^-24 */
        float scaled = fabsf(x) * 16777216.0f;
        return (half)(sign | (uint32_t)lrintf(scaled));
    }
    size += 0xfff + (size >> 13 & 1);
    return (half)(sign | ((size - 0x38000000) >> 13));
}

static float to_float(half h)
{
    float x = (h & 0x7c00) ? ldexpf((float)((h & 0x3ff) | 0x400), ((h >> 10) & 31) - 25) : ldexpf((float)(h & 0x3ff), -24);
    return h & 0x8000 ? -x : x;
}

static void emit2(const char *name, int i, const float *x, int a, int b)
{
    if (i >= 0) fprintf(dumped, "%s-%d %d %d\n", name, i, a, b);
    else fprintf(dumped, "%s %d %d\n", name, a, b);
    fwrite(x, sizeof(float), (size_t)a * b, dumped);
}

static void emit3(const char *name, int i, const float *x, int a, int b, int c)
{
    fprintf(dumped, "%s-%d %d %d %d\n", name, i, a, b, c);
    fwrite(x, sizeof(float), (size_t)a * b * c, dumped);
}

/* y = x W^T, four sums at once */
static void matmul(float *y, const float *x, int n, struct Tensor w)
{
    for (int t = 0; t < n; t++)
        for (int r = 0; r < w.rows; r++) {
            const float *a = x + (size_t)t * w.cols, *b = w.at + (size_t)r * w.cols;
            float s0 = 0, s1 = 0, s2 = 0, s3 = 0;
            for (int c = 0; c < w.cols; c += 4) {
                s0 += a[c] * b[c];
                s1 += a[c + 1] * b[c + 1];
                s2 += a[c + 2] * b[c + 2];
                s3 += a[c + 3] * b[c + 3];
            }
            y[(size_t)t * w.rows + r] = (s0 + s1) + (s2 + s3);
        }
}

static void biased(float *y, int n, struct Tensor b)
{
    if (b.at)
        for (int t = 0; t < n; t++)
            for (int i = 0; i < b.cols; i++) y[t * b.cols + i] += b.at[i];
}

static void rmsnorm(float *y, const float *x, int rows, struct Tensor w)
{
    for (int r = 0; r < rows; r++) {
        float ss = 0;
        for (int i = 0; i < w.cols; i++) ss += x[r * w.cols + i] * x[r * w.cols + i];
        float inv = 1.0f / sqrtf(ss / w.cols + EPS);
        for (int i = 0; i < w.cols; i++) y[r * w.cols + i] = w.at[i] * (x[r * w.cols + i] * inv);
    }
}

static float *cos_table, *sin_table; /* [token][d/2], made once */

static void make_tables(void)
{
    int n = cfg.d_head / 2;
    cos_table = grab(sizeof(float) * cfg.n_tok * n);
    sin_table = grab(sizeof(float) * cfg.n_tok * n);
    for (int t = 0; t < cfg.n_tok; t++)
        for (int i = 0; i < n; i++) {
            double angle = t / pow(BASE, (double)i / n);
            cos_table[t * n + i] = to_float(to_half((float)cos(angle)));
            sin_table[t * n + i] = to_float(to_half((float)sin(angle)));
        }
}

static void rotate_halves(float *x, int heads, float scale)
{
    int n = cfg.d_head / 2;
    for (int t = 0; t < cfg.n_tok; t++)
        for (int h = 0; h < heads; h++, x += 2 * n)
            for (int i = 0; i < n; i++) {
                float c = cos_table[t * n + i], s = sin_table[t * n + i], a = x[i], b = x[i + n];
#ifdef BUG_SIGN
                s = -s;
#endif
                x[i] = (a * c - b * s) * scale;
                x[i + n] = (a * s + b * c) * scale;
            }
}

static void to_cache(half *cache, const float *x)
{
    for (int t = 0; t < cfg.n_tok; t++)
        for (int i = 0; i < cfg.n_kv * cfg.d_head; i++) cache[i * cfg.n_tok + t] = to_half(x[t * cfg.n_kv * cfg.d_head + i]);
}

static int kv_of(int head)
{
#ifdef BUG_GROUP
    return head % cfg.n_kv;
#else
    return head / (cfg.n_head / cfg.n_kv);
#endif
}

static void attend(int il, struct Block *b, const float *q, float *mixed)
{
    int n = cfg.n_tok, d = cfg.d_head;
    float *scores = grab(sizeof(float) * cfg.n_head * n * n), *probs = grab(sizeof(float) * cfg.n_head * n * n);
    for (int h = 0; h < cfg.n_head; h++) {
        const half *keys = b->k_cache + (size_t)kv_of(h) * d * n, *values = b->v_cache + (size_t)kv_of(h) * d * n;
        for (int t = 0; t < n; t++) {
            float *row = scores + (h * n + t) * n, *p = probs + (h * n + t) * n, peak = -1e30f, sum = 0;
            for (int i = 0; i < d; i++) { /* all keys at once, a channel at a time */
                float a = q[(t * cfg.n_head + h) * d + i];
                for (int s = 0; s <= t; s++) row[s] += a * to_float(keys[i * n + s]);
            }
            for (int s = 0; s <= t; s++) peak = row[s] > peak ? row[s] : peak;
            for (int s = 0; s <= t; s++) sum += p[s] = expf(row[s] - peak);
            for (int s = 0; s <= t; s++) p[s] /= sum;
            for (int i = 0; i < d; i++) {
                float acc = 0;
                for (int s = 0; s <= t; s++) acc += p[s] * to_float(values[i * n + s]);
                mixed[(t * cfg.n_head + h) * d + i] = acc;
            }
        }
    }
    emit3("kq", il, scores, cfg.n_head, n, n);
    emit3("kq_soft_max", il, probs, cfg.n_head, n, n);
    free(scores);
    free(probs);
}

static void block(int il, struct Block *b, float *x)
{
    int n = cfg.n_tok, d = cfg.d_head, nq = cfg.n_head * d, nk = cfg.n_kv * d;
    float *h = grab(sizeof(float) * n * cfg.n_embd), *q = grab(sizeof(float) * n * nq), *k = grab(sizeof(float) * n * nk);
    float *v = grab(sizeof(float) * n * nk), *mixed = grab(sizeof(float) * n * nq);
    float *g = grab(sizeof(float) * n * cfg.n_ff), *u = grab(sizeof(float) * n * cfg.n_ff);
    rmsnorm(h, x, n, b->norm1), emit2("attn_norm", il, h, n, cfg.n_embd);
    matmul(q, h, n, b->wq), biased(q, n, b->bq), emit2("Qcur_proj", il, q, n, nq);
    matmul(k, h, n, b->wk), biased(k, n, b->bk), emit2("Kcur_proj", il, k, n, nk);
    matmul(v, h, n, b->wv), biased(v, n, b->bv), emit2("Vcur_proj", il, v, n, nk);
    if (cfg.qk_norm) {
        rmsnorm(q, q, n * cfg.n_head, b->nq), emit3("Qcur_normed", il, q, n, cfg.n_head, d);
        rmsnorm(k, k, n * cfg.n_kv, b->nk), emit3("Kcur_normed", il, k, n, cfg.n_kv, d);
    }
    rotate_halves(q, cfg.n_head, 1.0f / sqrtf((float)d)), emit3("Qcur_rope", il, q, n, cfg.n_head, d);
    rotate_halves(k, cfg.n_kv, 1.0f), emit3("Kcur_rope", il, k, n, cfg.n_kv, d);
    to_cache(b->k_cache, k), to_cache(b->v_cache, v);
    attend(il, b, q, mixed), emit2("kqv_out", il, mixed, n, nq);
    matmul(h, mixed, n, b->wo), emit2("attn_out", il, h, n, cfg.n_embd);
    for (int i = 0; i < n * cfg.n_embd; i++) x[i] = h[i] + x[i];
    emit2("ffn_inp", il, x, n, cfg.n_embd);
    rmsnorm(h, x, n, b->norm2), emit2("ffn_norm", il, h, n, cfg.n_embd);
    matmul(g, h, n, b->gate), emit2("ffn_gate", il, g, n, cfg.n_ff);
    matmul(u, h, n, b->up), emit2("ffn_up", il, u, n, cfg.n_ff);
    for (int i = 0; i < n * cfg.n_ff; i++) g[i] = g[i] * u[i] / (1.0f + expf(-g[i]));
    emit2("ffn_swiglu", il, g, n, cfg.n_ff);
    matmul(h, g, n, b->down), emit2("ffn_out", il, h, n, cfg.n_embd);
    for (int i = 0; i < n * cfg.n_embd; i++) x[i] = h[i] + x[i];
    emit2("l_out", il, x, n, cfg.n_embd);
    free(h), free(q), free(k), free(v), free(mixed), free(g), free(u);
}

int main(int argc, char *argv[])
{
    if (argc < 3) die("usage: halves MODEL DUMP");
    in = fopen(argv[1], "rb"), dumped = fopen(argv[2], "wb");
    if (!in || !dumped || fread(&cfg, sizeof cfg, 1, in) != 1) die("files cannot be opened");
    if (fread(&EPS, 4, 1, in) != 1 || fread(&BASE, 4, 1, in) != 1) die("model ends early");
#ifdef BUG_EPS
    EPS *= 10;
#endif
    int n = cfg.n_tok, e = cfg.n_embd, nq = cfg.n_head * cfg.d_head, nk = cfg.n_kv * cfg.d_head;
    int32_t *tok = grab(4 * n);
    if (fread(tok, 4, n, in) != (size_t)n) die("model ends early");
    make_tables();
    struct Tensor emb = load(cfg.n_vocab, e);
    struct Block *net = grab(sizeof(struct Block) * cfg.n_layer);
    for (int il = 0; il < cfg.n_layer; il++) {
        struct Block *b = net + il;
        b->norm1 = load(1, e);
        b->wq = unpermuted(load(nq, e)), b->wk = unpermuted(load(nk, e)), b->wv = load(nk, e);
        if (cfg.bias) { /* a bias is a column of rows here */
            b->bq = unpermuted(load(nq, 1)), b->bk = unpermuted(load(nk, 1)), b->bv = load(nk, 1);
            b->bq.cols = nq, b->bk.cols = b->bv.cols = nk;
        }
        if (cfg.qk_norm) b->nq = load(1, cfg.d_head), b->nk = load(1, cfg.d_head);
        b->wo = load(e, nq), b->norm2 = load(1, e);
        b->gate = load(cfg.n_ff, e), b->up = load(cfg.n_ff, e), b->down = load(e, cfg.n_ff);
        b->k_cache = grab(sizeof(half) * nk * n), b->v_cache = grab(sizeof(half) * nk * n);
    }
    struct Tensor last = load(1, e), out = load(cfg.n_vocab, e);
    float *x = grab(sizeof(float) * n * e), *y = grab(sizeof(float) * n * e), *z = grab(sizeof(float) * n * cfg.n_vocab);
    for (int t = 0; t < n; t++) memcpy(x + t * e, emb.at + (size_t)tok[t] * e, sizeof(float) * e);
    emit2("embd", -1, x, n, e);
    for (int il = 0; il < cfg.n_layer; il++) block(il, net + il, x);
    rmsnorm(y, x, n, last), emit2("result_norm", -1, y, n, e);
    matmul(z, y, n, out), emit2("result_output", -1, z, n, cfg.n_vocab);
    return fclose(dumped) ? 3 : 0;
}
