/* A whole inference engine of one layer in plain loops: what a user's looks like, with the trace writer put in.
 *
 *     engine WEIGHTS OUT TOKEN...
 *
 * WEIGHTS holds a raw f32 file for each weight of a model of tests/models/small.py. Built with -DBUG_ROPE, -DBUG_MASK or
 * -DBUG_EPS it has that bug. */
#include <math.h>

#include "trace_writer.c"

enum { EMBD = 256, FF = 512, VOCAB = 96, HEADS = 4, KV_HEADS = 2, DIM = 64, MAX_TOKENS = 32 };
enum { Q = HEADS * DIM, KV = KV_HEADS * DIM };

#ifdef BUG_EPS
static const double eps = 1e-4;
#else
static const double eps = 1e-5;
#endif

static const char *folder;
static trace_writer trace;
static int n; /* tokens */

static float *zeros(size_t count)
{
    float *values = (float *)calloc(count, sizeof(float));
    if (values == NULL) exit(3);
    return values;
}

static float *load(const char *name, size_t count)
{
    char path[1024];
    float *values = zeros(count);
    snprintf(path, sizeof path, "%s/%s.f32", folder, name);
    FILE *file = fopen(path, "rb");
    if (file == NULL || fread(values, sizeof(float), count, file) != count) {
        fprintf(stderr, "%s: cannot be read\n", path);
        exit(3);
    }
    fclose(file);
    return values;
}

/* Record [a, b], [a, b, c] if c is not zero. */
static void tap(const char *name, const float *values, int64_t a, int64_t b, int64_t c)
{
    const int64_t shape[] = {a, b, c};
    trace_add(&trace, name, values, shape, c ? 3 : 2);
}

static float *norm(const float *x, const char *name)
{
    const float *weight = load(name, EMBD);
    float *y = zeros((size_t)n * EMBD);
    for (int t = 0; t < n; t++) {
        double sum = 0;
        for (int i = 0; i < EMBD; i++) sum += (double)x[t * EMBD + i] * x[t * EMBD + i];
        const double scale = 1 / sqrt(sum / EMBD + eps);
        for (int i = 0; i < EMBD; i++) y[t * EMBD + i] = (float)(x[t * EMBD + i] * scale * weight[i]);
    }
    return y;
}

/* [token, in] times a weight [out, in] -> [token, out] */
static float *linear(const float *x, const char *name, int in, int out)
{
    const float *weight = load(name, (size_t)in * out);
    float *y = zeros((size_t)n * out);
    for (int t = 0; t < n; t++)
        for (int o = 0; o < out; o++) {
            double sum = 0;
            for (int i = 0; i < in; i++) sum += (double)x[t * in + i] * weight[o * in + i];
            y[t * out + o] = (float)sum;
        }
    return y;
}

static float *rope(const float *x, int heads)
{
    float *y = zeros((size_t)n * heads * DIM);
    for (int t = 0; t < n; t++)
        for (int h = 0; h < heads; h++)
            for (int i = 0; i < DIM / 2; i++) {
                const double angle = t * pow(10000.0, -2.0 * i / DIM), c = cos(angle), s = sin(angle);
#ifdef BUG_ROPE
                const int a = (t * heads + h) * DIM + i, b = a + DIM / 2;
#else
                const int a = (t * heads + h) * DIM + 2 * i, b = a + 1;
#endif
                y[a] = (float)(x[a] * c - x[b] * s);
                y[b] = (float)(x[a] * s + x[b] * c);
            }
    return y;
}

/* [token, head, dim], [token, kv_head, dim] -> [head, query, key] */
static float *scores(const float *q, const float *k)
{
    float *y = zeros((size_t)HEADS * n * n);
    for (int h = 0; h < HEADS; h++)
        for (int t = 0; t < n; t++)
            for (int s = 0; s < n; s++) {
                double sum = 0;
                for (int i = 0; i < DIM; i++) sum += (double)q[t * Q + h * DIM + i] * k[s * KV + h / 2 * DIM + i];
                y[(h * n + t) * n + s] = (float)sum;
            }
    return y;
}

static float *soft_max(const float *kq)
{
    float *y = zeros((size_t)HEADS * n * n);
    for (int row = 0; row < HEADS * n; row++) {
        int last = row % n; /* the query's own position */
#ifdef BUG_MASK
        if (last + 1 < n) last++;
#endif
        double max = -INFINITY, sum = 0;
        for (int s = 0; s <= last; s++) max = fmax(max, kq[row * n + s] / sqrt(DIM));
        for (int s = 0; s <= last; s++) sum += exp(kq[row * n + s] / sqrt(DIM) - max);
        for (int s = 0; s <= last; s++) y[row * n + s] = (float)(exp(kq[row * n + s] / sqrt(DIM) - max) / sum);
    }
    return y;
}

/* [head, query, key], [token, kv_head, dim] -> [token, head*dim] */
static float *mix(const float *probs, const float *v)
{
    float *y = zeros((size_t)n * Q);
    for (int t = 0; t < n; t++)
        for (int i = 0; i < Q; i++) {
            const int h = i / DIM;
            double sum = 0;
            for (int s = 0; s < n; s++) sum += (double)probs[(h * n + t) * n + s] * v[s * KV + h / 2 * DIM + i % DIM];
            y[t * Q + i] = (float)sum;
        }
    return y;
}

static float *swiglu(const float *gate, const float *up)
{
    float *y = zeros((size_t)n * FF);
    for (int i = 0; i < n * FF; i++) y[i] = (float)(gate[i] / (1 + exp(-(double)gate[i])) * up[i]);
    return y;
}

static float *add(const float *a, const float *b)
{
    float *y = zeros((size_t)n * EMBD);
    for (int i = 0; i < n * EMBD; i++) y[i] = a[i] + b[i];
    return y;
}

int main(int argc, char **argv)
{
    int32_t tokens[MAX_TOKENS];
    folder = argv[1];
    n = argc - 3;
    if (n < 1 || n > MAX_TOKENS) return 3;
    for (int t = 0; t < n; t++) tokens[t] = (int32_t)strtol(argv[3 + t], NULL, 10);
    trace_begin(&trace, argv[2], tokens, (size_t)n);

    const float *table = load("token_embd", VOCAB * EMBD);
    float *x = zeros((size_t)n * EMBD);
    for (int t = 0; t < n; t++) memcpy(x + t * EMBD, table + tokens[t] * EMBD, EMBD * sizeof(float));
    tap("embd", x, n, EMBD, 0);

    float *h = norm(x, "blk.0.attn_norm");
    tap("attn_norm-0", h, n, EMBD, 0);
    float *q = linear(h, "blk.0.attn_q", EMBD, Q), *k = linear(h, "blk.0.attn_k", EMBD, KV);
    float *v = linear(h, "blk.0.attn_v", EMBD, KV);
    tap("Qcur_proj-0", q, n, Q, 0);
    tap("Kcur_proj-0", k, n, KV, 0);
    tap("Vcur_proj-0", v, n, KV, 0);
    q = rope(q, HEADS), k = rope(k, KV_HEADS);
    tap("Qcur_rope-0", q, n, HEADS, DIM);
    tap("Kcur_rope-0", k, n, KV_HEADS, DIM);

    const float *kq = scores(q, k), *probs = soft_max(kq), *mixed = mix(probs, v);
    tap("kq-0", kq, HEADS, n, n);
    tap("kq_soft_max-0", probs, HEADS, n, n);
    tap("kqv_out-0", mixed, n, Q, 0);
    const float *attn = linear(mixed, "blk.0.attn_output", Q, EMBD);
    tap("attn_out-0", attn, n, EMBD, 0);
    x = add(attn, x);
    tap("ffn_inp-0", x, n, EMBD, 0);

    h = norm(x, "blk.0.ffn_norm");
    tap("ffn_norm-0", h, n, EMBD, 0);
    const float *gate = linear(h, "blk.0.ffn_gate", EMBD, FF), *up = linear(h, "blk.0.ffn_up", EMBD, FF);
    tap("ffn_gate-0", gate, n, FF, 0);
    tap("ffn_up-0", up, n, FF, 0);
    const float *act = swiglu(gate, up), *down = linear(act, "blk.0.ffn_down", FF, EMBD);
    tap("ffn_swiglu-0", act, n, FF, 0);
    tap("ffn_out-0", down, n, EMBD, 0);
    tap("l_out-0", add(down, x), n, EMBD, 0);

    if (trace_end(&trace) != 0) fprintf(stderr, "%s\n", trace.message);
    return trace.message[0] != '\0'; /* memory goes with the process */
}
