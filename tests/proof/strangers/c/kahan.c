/* A stranger that takes one token at a time: float32, compensated sums, attention over blocks of keys with a softmax that
 * is rescaled as it goes. Scores are never kept, so there is no kq and no kq_soft_max.
 *
 *     kahan MODEL DUMP          (formats: tests/proof/strangers/programs.py)
 *
 * -DBUG_RESCALE: the mixture is not rescaled when a larger score comes; -DBUG_POSITION: positions from 1;
 * -DBUG_LAST_ROW: the last output row of the down projection is not computed. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK = 3, MAX_TAPS = 256, MAX_LAYERS = 8 };

static int layers, embd, heads, kv_heads, dim, ff, vocab, pairs, has_bias, has_qk_norm, n;
static float eps, base;

static void *must(void *p)
{
    if (p == NULL) { fputs("no memory\n", stderr); exit(3); }
    return p;
}

static float *read_floats(FILE *f, size_t count)
{
    float *x = must(malloc(count * sizeof *x));
    if (fread(x, sizeof *x, count, f) != count) { fputs("the model is too short\n", stderr); exit(3); }
    return x;
}

/* -- what is dumped: rows of taps, token by token ---------------------------------------------------------------- */

struct tap { char name[32]; int width; float *rows; };
static struct tap taps[MAX_TAPS];
static int n_taps;

static void record(const char *word, int layer, int token, const float *x, int width)
{
    char name[32];
    int i;
    if (layer < 0) snprintf(name, sizeof name, "%s", word);
    else snprintf(name, sizeof name, "%s-%d", word, layer);
    for (i = 0; i < n_taps && strcmp(taps[i].name, name) != 0; i++) { }
    if (i == n_taps) {
        if (n_taps == MAX_TAPS) { fputs("too many taps\n", stderr); exit(3); }
        n_taps++;
        strcpy(taps[i].name, name);
        taps[i].width = width;
        taps[i].rows = must(calloc((size_t)n * width, sizeof(float)));
    }
    memcpy(taps[i].rows + (size_t)token * width, x, width * sizeof(float));
}

static void dump(const char *path)
{
    FILE *f = fopen(path, "wb");
    if (f == NULL) { perror(path); exit(3); }
    for (int i = 0; i < n_taps; i++) {
        fprintf(f, "%s %d %d\n", taps[i].name, n, taps[i].width);
        fwrite(taps[i].rows, sizeof(float), (size_t)n * taps[i].width, f);
    }
    fclose(f);
}

/* -- the maths ---------------------------------------------------------------------------------------------------- */

static float dot(const float *a, const float *b, int count)
{
    volatile float sum = 0, lost = 0; /* volatile: no compiler may cancel what is lost */
    for (int i = 0; i < count; i++) {
        float y = a[i] * b[i] - lost, t = sum + y;
        lost = (t - sum) - y;
        sum = t;
    }
    return sum;
}

static void multiply(float *y, const float *w, const float *x, int rows, int columns)
{
    for (int r = 0; r < rows; r++) y[r] = dot(w + (size_t)r * columns, x, columns);
}

static void rms_norm(float *y, const float *x, const float *w, int count)
{
    float factor = 1 / sqrtf(dot(x, x, count) / count + eps);
    for (int i = 0; i < count; i++) y[i] = x[i] * factor * w[i];
}

static void rotate(float *x, int count, int position)
{
    for (int h = 0; h < count; h++, x += dim)
        for (int i = 0; i < dim / 2; i++) {
            double theta = position * pow(base, -2.0 * i / dim);
            float c = (float)cos(theta), s = (float)sin(theta);
            float *a = pairs ? x + 2 * i : x + i, *b = pairs ? a + 1 : a + dim / 2;
            float turned = *a * c - *b * s;
            *b = *a * s + *b * c;
            *a = turned;
        }
}

struct layer {
    float *attn_norm, *q, *k, *v, *bq, *bk, *bv, *q_norm, *k_norm, *o, *ffn_norm, *gate, *up, *down;
    float *keys, *values; /* [token][kv_heads * dim] */
};
static struct layer net[MAX_LAYERS];

/* One head's attention, a block of keys at a time. */
static void attend(float *out, const float *q, const float *keys, const float *values, int stride, int seen)
{
    float most = -INFINITY, total = 0, weights[BLOCK], scale = 1 / sqrtf((float)dim);
    memset(out, 0, dim * sizeof(float));
    for (int start = 0; start < seen; start += BLOCK) {
        int count = seen - start < BLOCK ? seen - start : BLOCK;
        float largest = most;
        for (int j = 0; j < count; j++) {
            weights[j] = dot(q, keys + (size_t)(start + j) * stride, dim) * scale;
            if (weights[j] > largest) largest = weights[j];
        }
        float fade = expf(most - largest);
#ifdef BUG_RESCALE
        total *= fade;
#else
        total *= fade;
        for (int i = 0; i < dim; i++) out[i] *= fade;
#endif
        for (int j = 0; j < count; j++) {
            float e = expf(weights[j] - largest);
            total += e;
            for (int i = 0; i < dim; i++) out[i] += e * values[(size_t)(start + j) * stride + i];
        }
        most = largest;
    }
    for (int i = 0; i < dim; i++) out[i] /= total;
}

static void add_to(float *x, const float *y, int count)
{
    if (y != NULL) for (int i = 0; i < count; i++) x[i] += y[i];
}

static void run_layer(int l, int t, float *x)
{
    struct layer *w = &net[l];
    int nq = heads * dim, nkv = kv_heads * dim, position = t;
    float *y = must(malloc((size_t)(2 * embd + nq + 2 * nq + 3 * ff) * sizeof(float)));
    float *q = y + embd, *mixed = q + nq, *out = mixed + nq, *gate = out + embd, *up = gate + ff, *g = up + ff;
    float *k = w->keys + (size_t)t * nkv, *v = w->values + (size_t)t * nkv;
#ifdef BUG_POSITION
    position = t + 1;
#endif
    rms_norm(y, x, w->attn_norm, embd);
    record("attn_norm", l, t, y, embd);
    multiply(q, w->q, y, nq, embd);
    multiply(k, w->k, y, nkv, embd);
    multiply(v, w->v, y, nkv, embd);
    add_to(q, w->bq, nq);
    add_to(k, w->bk, nkv);
    add_to(v, w->bv, nkv);
    record("Qcur_proj", l, t, q, nq);
    record("Kcur_proj", l, t, k, nkv);
    record("Vcur_proj", l, t, v, nkv);
    if (has_qk_norm) {
        for (int h = 0; h < heads; h++) rms_norm(q + h * dim, q + h * dim, w->q_norm, dim);
        for (int h = 0; h < kv_heads; h++) rms_norm(k + h * dim, k + h * dim, w->k_norm, dim);
        record("Qcur_normed", l, t, q, nq);
        record("Kcur_normed", l, t, k, nkv);
    }
    rotate(q, heads, position);
    rotate(k, kv_heads, position);
    record("Qcur_rope", l, t, q, nq);
    record("Kcur_rope", l, t, k, nkv);
    for (int h = 0; h < heads; h++) {
        int kv = h / (heads / kv_heads) * dim;
        attend(mixed + h * dim, q + h * dim, w->keys + kv, w->values + kv, nkv, t + 1);
    }
    record("kqv_out", l, t, mixed, nq);
    multiply(out, w->o, mixed, embd, nq);
    record("attn_out", l, t, out, embd);
    add_to(x, out, embd);
    record("ffn_inp", l, t, x, embd);
    rms_norm(y, x, w->ffn_norm, embd);
    record("ffn_norm", l, t, y, embd);
    multiply(gate, w->gate, y, ff, embd);
    multiply(up, w->up, y, ff, embd);
    record("ffn_gate", l, t, gate, ff);
    record("ffn_up", l, t, up, ff);
    for (int i = 0; i < ff; i++) g[i] = gate[i] / (1 + expf(-gate[i])) * up[i];
    record("ffn_swiglu", l, t, g, ff);
    multiply(out, w->down, g, embd, ff);
#ifdef BUG_LAST_ROW
    out[embd - 1] = 0;
#endif
    record("ffn_out", l, t, out, embd);
    add_to(x, out, embd);
    record("l_out", l, t, x, embd);
    free(y);
}

int main(int argc, char **argv)
{
    int head[11];
    float real[2];
    FILE *f = argc == 3 ? fopen(argv[1], "rb") : NULL;
    if (f == NULL) { fputs("usage: kahan MODEL DUMP\n", stderr); return 2; }
    if (fread(head, sizeof head, 1, f) != 1 || fread(real, sizeof real, 1, f) != 1) return 3;
    layers = head[0], embd = head[1], heads = head[2], kv_heads = head[3], dim = head[4], ff = head[5];
    vocab = head[6], pairs = head[7], has_bias = head[8], has_qk_norm = head[9], n = head[10];
    eps = real[0], base = real[1];
    int *tokens = must(malloc(n * sizeof(int))), nq = heads * dim, nkv = kv_heads * dim;
    if (layers > MAX_LAYERS || fread(tokens, sizeof(int), n, f) != (size_t)n) return 3;
    float *table = read_floats(f, (size_t)vocab * embd);
    for (int l = 0; l < layers; l++) {
        struct layer *w = &net[l];
        w->attn_norm = read_floats(f, embd);
        w->q = read_floats(f, (size_t)nq * embd);
        w->k = read_floats(f, (size_t)nkv * embd);
        w->v = read_floats(f, (size_t)nkv * embd);
        if (has_bias) w->bq = read_floats(f, nq), w->bk = read_floats(f, nkv), w->bv = read_floats(f, nkv);
        if (has_qk_norm) w->q_norm = read_floats(f, dim), w->k_norm = read_floats(f, dim);
        w->o = read_floats(f, (size_t)embd * nq);
        w->ffn_norm = read_floats(f, embd);
        w->gate = read_floats(f, (size_t)ff * embd);
        w->up = read_floats(f, (size_t)ff * embd);
        w->down = read_floats(f, (size_t)embd * ff);
        w->keys = must(calloc((size_t)n * nkv, sizeof(float)));
        w->values = must(calloc((size_t)n * nkv, sizeof(float)));
    }
    float *final = read_floats(f, embd), *output = read_floats(f, (size_t)vocab * embd);
    float *x = must(malloc(2 * embd * sizeof(float))), *logits = must(malloc(vocab * sizeof(float)));
    fclose(f);
    for (int t = 0; t < n; t++) {
        memcpy(x, table + (size_t)tokens[t] * embd, embd * sizeof(float));
        record("embd", -1, t, x, embd);
        for (int l = 0; l < layers; l++) run_layer(l, t, x);
        rms_norm(x + embd, x, final, embd);
        record("result_norm", -1, t, x + embd, embd);
        multiply(logits, output, x + embd, vocab, embd);
        record("result_output", -1, t, logits, vocab);
    }
    dump(argv[2]);
    return 0;
}
