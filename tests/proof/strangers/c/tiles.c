/* A stranger that takes all tokens at once and works in tiles: matrices in blocks of rows and inputs, and
 * attention in blocks of keys, with a softmax that is rescaled as it goes. It makes the mistake that a third
 * argument names (formats: tests/proof/strangers/programs.py). */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 24, INPUTS = 36, KEYS = 5 }; /* of a tile: odd sizes, so that there are remainders everywhere */

enum mistake { NONE, MEMCPY, UNROLL, SIZEOF, ALIAS, LANE, CARRY, STRIDE, STATIC, THREADS, OVERLAP };
static const char *const names[] = {
    "none", "memcpy", "unroll", "sizeof", "alias", "lane", "carry", "stride", "static", "threads", "overlap"};
static enum mistake chosen;

static struct { int layers, embd, heads, kv_heads, dim, ff, vocab, pairs, bias, qk_norm, n; } m;
static float eps, base;
static FILE *dump;

/* The one mistake that a call can have, if it is the chosen one. */
static enum mistake only(enum mistake one) { return chosen == one ? one : NONE; }
static int least(int a, int b) { return a < b ? a : b; }
static void give_up(const char *why) { fprintf(stderr, "tiles: %s\n", why); exit(3); }

static float *zeros(size_t count)
{
    float *x = calloc(count, sizeof *x);
    if (x == NULL) give_up("no memory");
    return x;
}

static const float *take(FILE *f, size_t count)
{
    float *x = zeros(count);
    if (fread(x, sizeof *x, count, f) != count) give_up("the model is too short");
    return x;
}

/* Writes a tap of two or three axes. */
static void tap(const char *word, int layer, const float *x, int a, int b, int c)
{
    fprintf(dump, layer < 0 ? "%s" : "%s-%d", word, layer);
    fprintf(dump, c ? " %d %d %d\n" : " %d %d\n", a, b, c);
    fwrite(x, sizeof *x, (size_t)a * b * (c ? c : 1), dump);
}

/* A product of two vectors in eight lanes, then what is left. */
static float dot(const float *a, const float *b, int count, int wrong)
{
    float lane[8] = {0}, sum = 0;
    int i = 0;
    for (; i + 8 <= count; i += 8)
        for (int j = 0; j < 8; j++) lane[j] += a[i + j] * b[i + j];
    if (wrong == UNROLL) i++; /* mistake: the tail starts one too late */
    for (; i < count; i++) sum += a[i] * b[i];
    for (int j = 0; j < 8; j++) sum += lane[j];
    return sum;
}

/* Some rows of a matrix times one token's inputs, tile after tile of inputs. */
static void row_tile(float *sums, const float *w, const float *x, int rows, int inputs, int wrong)
{
    size_t bytes = wrong == SIZEOF ? sizeof sums : ROWS * sizeof *sums; /* mistake: the size of a pointer */
    memset(sums, 0, bytes);
    for (int start = 0; start < inputs; start += INPUTS)
        for (int r = 0; r < rows; r++)
            sums[r] += dot(w + (size_t)r * inputs + start, x + start, least(INPUTS, inputs - start), NONE);
}

/* y = w x + b for all tokens; the rows are in two shares, as for two threads. */
static void multiply(float *y, const float *w, const float *b, const float *x, int rows, int cols, int wrong)
{
    for (int share = 0; share < 2; share++) {
        int first = share ? rows / 2 : 0, end = share ? rows : rows / 2, to = first;
        if (wrong == THREADS) to = share ? 0 : rows / 2; /* mistake: each goes where the other belongs */
        for (int row = first; row < end; row += ROWS) {
            float sums[ROWS] = {0};
            int count = least(ROWS, end - row);
            for (int t = 0; t < m.n; t++) {
                row_tile(sums, w + (size_t)row * cols, x + (size_t)t * cols, count, cols, wrong);
                memcpy(y + (size_t)t * rows + to + row - first, sums, count * sizeof *sums);
            }
        }
    }
    for (int i = 0; b != NULL && i < m.n * rows; i++) y[i] += b[i % rows];
}

static void norm(float *y, const float *x, const float *w, int rows, int count, int wrong)
{
    for (int r = 0; r < rows; r++, x += count, y += count) {
        float squares = 0;
        for (int i = 0; i < count; i += INPUTS) squares += dot(x + i, x + i, least(INPUTS, count - i), wrong);
        float factor = 1 / sqrtf(squares / count + eps);
        for (int i = 0; i < count; i++) y[i] = x[i] * factor * w[i];
    }
}

/* RoPE from one place to another, which may be the same. */
static void rotate(float *to, const float *from, int heads, int wrong)
{
    for (int row = 0; row < m.n * heads; row++, to += m.dim, from += m.dim)
        for (int i = 0; i < m.dim / 2; i++) {
            double angle = row / heads * pow(base, -2.0 * i / m.dim);
            float c = (float)cos(angle), s = (float)sin(angle);
            int a = m.pairs ? 2 * i : i, b = a + (m.pairs ? 1 : m.dim / 2);
            float u = from[a], v = from[b];
            to[a] = u * c - v * s;
            if (wrong == ALIAS) u = from[a]; /* mistake: read again, but in place it is overwritten by now */
            to[b] = u * s + v * c;
        }
}

static void add(float *x, const float *y, int wrong)
{
    for (int t = 0; t < m.n; t++, x += m.embd, y += m.embd)
        for (int start = 0; start < m.embd; start += INPUTS) {
            int end = least(start + INPUTS, m.embd);
            int from = wrong == OVERLAP ? end - INPUTS : start; /* mistake: the last tile overlaps */
            for (int i = from; i < end; i++) x[i] += y[i];
        }
}

static void swiglu(float *gate, const float *up)
{
    static float silu[ROWS];
    for (int t = 0; t < m.n; t++)
        for (int start = 0; start < m.ff; start += ROWS) {
            int count = least(ROWS, m.ff - start), at = t * m.ff + start, fill = count;
            if (chosen == STATIC && count < ROWS) fill = 0; /* mistake: the tile before is still in there */
            for (int i = 0; i < fill; i++) silu[i] = gate[at + i] / (1 + expf(-gate[at + i]));
            for (int i = 0; i < count; i++) gate[at + i] = silu[i] * up[at + i];
        }
}

/* Attention of all heads: keys [KV head][block][dim][KEYS], values [KV head][slot][dim]. */
static void attend(float *out, float *kq, float *soft, const float *q, const float *k, const float *v)
{
    int blocks = (m.n + KEYS - 1) / KEYS, slots = blocks * KEYS, nkv = m.kv_heads * m.dim;
    float *keys = zeros((size_t)slots * nkv), *values = zeros((size_t)slots * nkv);
    for (int p = 0; p < m.n; p++)
        for (int i = 0; i < nkv; i++) {
            int kv = i / m.dim, lane = p % KEYS;
            if (chosen == LANE) lane = p & (KEYS - 1); /* mistake: that is for powers of two */
            keys[((kv * blocks + p / KEYS) * m.dim + i % m.dim) * KEYS + lane] = k[p * nkv + i];
            values[(kv * slots + p) * m.dim + i % m.dim] = v[p * nkv + i];
        }
    for (int h = 0; h < m.heads; h++)
        for (int t = 0; t < m.n; t++, kq += m.n, soft += m.n) {
            int kv = h / (m.heads / m.kv_heads);
            int stride = (chosen == STRIDE ? m.n : slots) * m.dim; /* mistake: only the slots in use */
            const float *one = q + (t * m.heads + h) * m.dim;
            float *mix = out + (t * m.heads + h) * m.dim, most = -INFINITY, total = 0;
            memset(mix, 0, m.dim * sizeof *mix), memset(soft, 0, m.n * sizeof *soft);
            for (int b = 0; b < blocks; b++) {
                const float *block = keys + (kv * blocks + b) * m.dim * KEYS;
                float score[KEYS] = {0}, scale = 1 / sqrtf((float)m.dim), largest = most, fade;
                int first = b * KEYS, end = least(first + KEYS, t + 1); /* the keys that the token sees */
                for (int i = 0; i < m.dim; i++)
                    for (int j = 0; j < KEYS; j++) score[j] += one[i] * block[i * KEYS + j];
                for (int j = 0; j < KEYS && first + j < m.n; j++) kq[first + j] = score[j];
                if (first >= end) continue;
                if (chosen == CARRY) largest = -INFINITY; /* mistake: the largest of each block alone */
                for (int p = first; p < end; p++) largest = fmaxf(largest, score[p - first] * scale);
                fade = chosen == CARRY ? 1 : expf(most - largest); /* and what came before stays as it is */
                total *= fade, most = largest;
                for (int i = 0; i < m.dim; i++) mix[i] *= fade;
                for (int p = 0; p < first; p++) soft[p] *= fade;
                for (int p = first; p < end; p++) {
                    soft[p] = expf(score[p - first] * scale - largest);
                    total += soft[p];
                    for (int i = 0; i < m.dim; i++) mix[i] += soft[p] * values[kv * stride + p * m.dim + i];
                }
            }
            for (int i = 0; i < m.dim; i++) mix[i] /= total;
            for (int p = 0; p <= t; p++) soft[p] /= total;
        }
    free(keys), free(values);
}

int main(int argc, char **argv)
{
    float real[2];
    FILE *f = argc == 3 || argc == 4 ? fopen(argv[1], "rb") : NULL;
    while (argc == 4 && chosen <= OVERLAP && strcmp(argv[3], names[chosen])) chosen++;
    if (f == NULL || chosen > OVERLAP) { fputs("usage: tiles MODEL DUMP [MISTAKE]\n", stderr); return 2; }
    if (fread(&m, sizeof m, 1, f) != 1 || fread(real, sizeof real, 1, f) != 1) give_up("that is no model");
    eps = real[0], base = real[1];
    int n = m.n, e = m.embd, ff = m.ff, nq = m.heads * m.dim, nkv = m.kv_heads * m.dim, tokens[4096];
    if (n > 4096 || fread(tokens, sizeof *tokens, n, f) != (size_t)n) give_up("the tokens cannot be read");
    if ((dump = fopen(argv[2], "wb")) == NULL) give_up("the dump cannot be written");
    float *x = zeros(n * e), *y = zeros(n * e), *q = zeros(n * nq), *k = zeros(n * nkv), *v = zeros(n * nkv);
    float *turned = zeros(n * nkv), *mix = zeros(n * nq), *gate = zeros(n * ff), *up = zeros(n * ff);
    float *kq = zeros(n * n * m.heads), *soft = zeros(n * n * m.heads), *logits = zeros(n * m.vocab);
    const float *table = take(f, (size_t)m.vocab * e), *w[14] = {0};
    for (int t = 0; t < n; t++) {
        size_t each = chosen == MEMCPY ? 1 : sizeof *x; /* mistake: a number of elements, not of bytes */
        memcpy(x + t * e, table + tokens[t] * e, e * each);
    }
    tap("embd", -1, x, n, e, 0);
    for (int l = 0; l < m.layers; l++) {
        const int rows[14] = {1, nq, nkv, nkv, 1, 1, 1, 1, 1, e, 1, ff, ff, e}; /* in the order of the file */
        const int columns[14] = {e, e, e, e, nq, nkv, nkv, m.dim, m.dim, nq, e, e, e, ff};
        for (int i = 0; i < 14; i++)
            if (i < 4 || i > 8 || (i < 7 ? m.bias : m.qk_norm)) w[i] = take(f, (size_t)rows[i] * columns[i]);
        norm(y, x, w[0], n, e, only(UNROLL)), tap("attn_norm", l, y, n, e, 0);
        multiply(q, w[1], w[4], y, nq, e, NONE), tap("Qcur_proj", l, q, n, nq, 0);
        multiply(k, w[2], w[5], y, nkv, e, NONE), tap("Kcur_proj", l, k, n, nkv, 0);
        multiply(v, w[3], w[6], y, nkv, e, only(SIZEOF)), tap("Vcur_proj", l, v, n, nkv, 0);
        if (m.qk_norm) {
            norm(q, q, w[7], n * m.heads, m.dim, NONE), tap("Qcur_normed", l, q, n, m.heads, m.dim);
            norm(k, k, w[8], n * m.kv_heads, m.dim, NONE), tap("Kcur_normed", l, k, n, m.kv_heads, m.dim);
        }
        rotate(q, q, m.heads, only(ALIAS)), tap("Qcur_rope", l, q, n, m.heads, m.dim);
        rotate(turned, k, m.kv_heads, only(ALIAS)), tap("Kcur_rope", l, turned, n, m.kv_heads, m.dim);
        attend(mix, kq, soft, q, turned, v), tap("kq", l, kq, m.heads, n, n);
        tap("kq_soft_max", l, soft, m.heads, n, n), tap("kqv_out", l, mix, n, nq, 0);
        multiply(y, w[9], NULL, mix, e, nq, NONE), tap("attn_out", l, y, n, e, 0);
        add(x, y, NONE), tap("ffn_inp", l, x, n, e, 0);
        norm(y, x, w[10], n, e, NONE), tap("ffn_norm", l, y, n, e, 0);
        multiply(gate, w[11], NULL, y, ff, e, NONE), tap("ffn_gate", l, gate, n, ff, 0);
        multiply(up, w[12], NULL, y, ff, e, NONE), tap("ffn_up", l, up, n, ff, 0);
        swiglu(gate, up), tap("ffn_swiglu", l, gate, n, ff, 0);
        multiply(y, w[13], NULL, gate, e, ff, only(THREADS)), tap("ffn_out", l, y, n, e, 0);
        add(x, y, only(OVERLAP)), tap("l_out", l, x, n, e, 0);
    }
    norm(y, x, take(f, e), n, e, NONE), tap("result_norm", -1, y, n, e, 0);
    multiply(logits, take(f, (size_t)m.vocab * e), NULL, y, m.vocab, e, NONE);
    tap("result_output", -1, logits, n, m.vocab, 0);
    return fclose(f) || fclose(dump) ? 3 : 0;
}
