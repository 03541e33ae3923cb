// What takes longest of a comparison, in C. Python calls it through ctypes, and its other threads run meanwhile.
//
// Whoever calls answers for all sizes. Every sum is taken in one order, whatever the number of threads.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

enum {
    WIDTH = 16,              // columns of X and C come in as many
    PANEL = 3 * WIDTH,       // columns of X that lie together
    ROWS = 64,               // of W, decoded together
    DEPTH = 256,             // weights of each of them
    STRIDE = DEPTH + WIDTH,  // floats from row to row: of a power of two all would share a few places of the cache
};

typedef void (*decoder)(const void *blocks, float *values, int64_t count);

// Floats of blocks of Q4_K, or Q6_K, ``count`` in all
void llamadiff_q4_k(const void *blocks, float *values, int64_t count);
void llamadiff_q6_k(const void *blocks, float *values, int64_t count);

// A matrix W, as a GGUF file keeps it, decoded and multiplied: X W^T, and W^T C in the same pass over it. A piece of W is
// decoded into memory that stays in the cache, and multiplied from there: nothing is packed, and no row is decoded twice.
struct product {
    const uint8_t *rows;   // W: n_out rows, row_bytes apart
    int64_t row_bytes, n_out, n_in;
    int64_t values, size;  // of a block: how many values in how many bytes
    decoder decode;        // NULL: the values are floats
    const float *x;        // X^T in panels of PANEL columns, the last of the rest: [n_in][column] each
    float *y;              // X W^T [used][n_out]
    int64_t n, used;       // columns of X, a multiple of WIDTH, and how many of them are wanted
    const float *c;        // C [n_out][WIDTH], or NULL
    float *z;              // W^T C of each unit [unit][n_in][WIDTH]
    int64_t unit;          // rows of W that a thread takes at once, a multiple of ROWS
    double *squares;       // of each of W's rows, which are floats, the sum of squares; or NULL
    double *edges;         // with it: of all of W, as ``look`` has them, if one thread takes it all
};

// Rows of a tensor: pieces of values that lie together, so many values apart
struct tensor {
    const float *values;
    int64_t row, part;
};

// A float16, by its bytes
static inline float half(const uint8_t *at) {
    const uint32_t bits = at[0] | at[1] << 8, sign = (bits & 0x8000) << 16, size = bits & 0x7fff;
    union { uint32_t bits; float value; } made;
    if (size < 0x0400) {  // subnormal: a whole number of 2^-24
        made.value = (float)size * 0x1p-24f;
        made.bits |= sign;
    } else {
        made.bits = sign | ((size << 13) + (size < 0x7c00 ? 112u << 23 : 224u << 23));
    }
    return made.value;
}

// the larger of numbers that are not negative, without a comparison, for which compilers take vectors apart
#define LARGER(a, b) ((b) + (((a) - (b)) & ~(((a) - (b)) >> 31)))

// -- each function for several instruction sets ---------------------------------------------------------------------

#define OF(name) name##_any
#define TARGET
#define LANES 4
#include "variant.h"

#if defined(__x86_64__)
#define OF(name) name##_avx2
#define TARGET __attribute__((target("avx2,fma")))
#define LANES 8
#define TILE_ROWS 4
#define TILE_VECTORS 2
#include "variant.h"

#define OF(name) name##_avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")))
#define LANES 16
#define TILE_ROWS 8
#define TILE_VECTORS 3
#include "variant.h"
#endif

enum set { ANY, AVX2, AVX512 };

#if defined(ONLY)  // for tests: this one, whatever the processor is
static enum set chosen(void) { return ONLY; }
#elif defined(__x86_64__)
static enum set chosen(void) {
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return ANY;
    const int wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return wide ? AVX512 : AVX2;
}
#else
static enum set chosen(void) { return ANY; }
#endif

#if defined(__x86_64__)
#define WIDE(function, ...) (chosen() == AVX512 ? function##_avx512(__VA_ARGS__) : function##_avx2(__VA_ARGS__))
#define CALL(function, ...) (chosen() == ANY ? function##_any(__VA_ARGS__) : WIDE(function, __VA_ARGS__))
#else
#define CALL(function, ...) function##_any(__VA_ARGS__)
#endif

// -- what is called -------------------------------------------------------------------------------------------------

// The instruction set that is used
const char *llamadiff_instructions(void) { return chosen() == AVX512 ? "avx512" : chosen() == AVX2 ? "avx2" : "any"; }

// Values through Q8_K, ``count`` in all, a multiple of 256
void llamadiff_round_q8_k(const float *x, int64_t count, float *out) { CALL(round_q8_k, x, count, out); }

// Of n rows the sums of squares [n]; edges: the sum of all, the smallest and the largest
void llamadiff_look(const struct tensor *x, int64_t n, int64_t parts, int64_t width, double *squares, double *edges) {
    CALL(look, x, n, parts, width, squares, edges);
}

// Of n rows the sums of squares of a - b, of a, and of b, in ``sums`` [3][n]; the largest |a - b|, and where it is; the
// edges of a, and of b, as ``look`` has them
void llamadiff_gaps(const struct tensor *a, const struct tensor *b, int64_t n, int64_t parts, int64_t width,
                    double *sums, double *largest, int64_t *place, double *edges) {
    CALL(gaps, a, b, n, parts, width, sums, largest, place, edges);
}

// Of ``count`` values the sums of the powers two to four of what they are from their mean; where the largest |x| is
void llamadiff_moments(const float *x, int64_t count, double mean, double *sums, int64_t *place) {
    CALL(moments, x, count, mean, sums, place);
}

// Attention's probabilities of scores [heads][queries][keys]; a query sees its first seen[query] keys
void llamadiff_softmax(const float *x, int64_t heads, int64_t queries, int64_t keys, const int64_t *seen, float scale,
                       float *out) {
    CALL(softmax, x, heads, queries, keys, seen, scale, out);
}

// silu(gate) * up, ``count`` in all
void llamadiff_swiglu(const float *gate, const float *up, int64_t count, float *out) {
    CALL(swiglu, gate, up, count, out);
}

// RMSNorm of n rows
void llamadiff_rms_norm(const float *x, int64_t n, int64_t width, const float *weight, double eps, float *out) {
    CALL(rms_norm, x, n, width, weight, eps, out);
}

// RoPE of [n][heads][width] by angles [n][turned], of neighbours or of halves
void llamadiff_rope(const float *x, int64_t n, int64_t heads, int64_t width, int64_t turned, int neighbours,
                    const double *cos, const double *sin, float *out) {
    CALL(rope, x, n, heads, width, turned, neighbours, cos, sin, out);
}

#if defined(__x86_64__)
// What follows is for AVX2 and AVX-512: of other processors BLAS knows more.

void llamadiff_q4_k(const void *blocks, float *values, int64_t count) { WIDE(decode_q4_k, blocks, values, count); }
void llamadiff_q6_k(const void *blocks, float *values, int64_t count) { WIDE(decode_q6_k, blocks, values, count); }

// Rows x [n][n_in] as columns from column ``at`` on of the panels of ``columns`` in all
void llamadiff_pack(const float *x, int64_t n, int64_t n_in, int64_t at, int64_t columns, float *panels) {
    for (int64_t first = 0; first < n_in; first += WIDTH)
        for (int64_t t = 0; t < n; t++) {
            const int64_t panel = (at + t) / PANEL * PANEL, width = columns - panel < PANEL ? columns - panel : PANEL;
            const int64_t last = n_in - first < WIDTH ? n_in : first + WIDTH;
            float *to = panels + panel * n_in + (at + t - panel);
            for (int64_t k = first; k < last; k++) to[k * width] = x[t * n_in + k];
        }
}

// The sum of n parts of ``count`` numbers each
void llamadiff_sum(const float *parts, int64_t n, int64_t count, double *sum) {
    for (int64_t i = 0; i < count; i++) sum[i] = parts[i];
    for (int64_t part = 1; part < n; part++)
        for (int64_t i = 0; i < count; i++) sum[i] += parts[part * count + i];
}

// The units that no other thread has begun: *next counts them. -> 0 where there is no memory
int llamadiff_multiply(const struct product *p, int64_t *next) {
    float *room;
    if (posix_memalign((void **)&room, 64, (ROWS * STRIDE + ROWS * WIDTH + ROWS * p->n) * sizeof(float))) return 0;
    WIDE(multiply, p, next, room);
    free(room);
    return 1;
}
#endif
