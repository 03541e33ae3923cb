// What takes longest of a comparison, in C. Python calls it through ctypes, and its other threads run meanwhile.
//
// Whoever calls answers for all sizes. Every sum is taken in one order, whatever the number of threads.

#include <stdint.h>
#include <string.h>

#if !defined(__GNUC__) && !defined(__clang__)
#error "needs GCC's vectors, which clang has too; without kernels NumPy does the same"
#endif

#if defined(_WIN32)
#define SHARED __declspec(dllexport)
SHARED void *PyInit_kernels(void) { return 0; }  // an installation there exports it of any extension; nobody calls it
#else
#define SHARED
#endif

// Instruction sets of its own; not by GCC for Windows, whose stack has no room for wide vectors (its bug 54412)
#if defined(__x86_64__) && (defined(__clang__) || !defined(_WIN32))
#define SEVERAL
#endif

// Rows of a tensor: pieces of values that lie together, so many values apart
struct tensor {
    const float *values;
    int64_t row, part;
};

// the larger of numbers that are not negative, without a comparison, for which compilers take vectors apart
#define LARGER(a, b) ((b) + (((a) - (b)) & ~(((a) - (b)) >> 31)))

// -- each function for several instruction sets ---------------------------------------------------------------------

#define OF(name) name##_any
#define TARGET
#define LANES 4
#include "variant.h"

#if defined(SEVERAL)
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

#define OF(name) name##_avx2
#define TARGET __attribute__((target("avx2,fma")))
#define LANES 8
#include "variant.h"

#define OF(name) name##_avx512
#if defined(__clang__)
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"), min_vector_width(512)))
#else
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")))
#endif
#define LANES 16
#include "variant.h"
#endif

enum set { ANY, AVX2, AVX512 };

#if defined(ONLY)  // for tests: this one, whatever the processor is
static enum set chosen(void) { return ONLY; }
#elif defined(SEVERAL)
static enum set chosen(void) {
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return ANY;
    const int wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return wide ? AVX512 : AVX2;
}
#else
static enum set chosen(void) { return ANY; }
#endif

#if defined(SEVERAL)
#define WIDE(function, ...) (chosen() == AVX512 ? function##_avx512(__VA_ARGS__) : function##_avx2(__VA_ARGS__))
#define CALL(function, ...) (chosen() == ANY ? function##_any(__VA_ARGS__) : WIDE(function, __VA_ARGS__))
#else
#define CALL(function, ...) function##_any(__VA_ARGS__)
#endif

// -- what is called -------------------------------------------------------------------------------------------------

// The instruction set that is used
SHARED const char *llamadiff_instructions(void) { return chosen() == AVX512 ? "avx512" : chosen() == AVX2 ? "avx2" : "any"; }

// Values through Q8_K, ``count`` in all, a multiple of 256
SHARED void llamadiff_round_q8_k(const float *x, int64_t count, float *out) { CALL(round_q8_k, x, count, out); }

// Of n rows the sums of squares [n]; edges: the sum of all, the smallest and the largest
SHARED void llamadiff_look(const struct tensor *x, int64_t n, int64_t parts, int64_t width, double *squares, double *edges) {
    CALL(look, x, n, parts, width, squares, edges);
}

// Of n rows the sums of squares of a - b, of a, and of b, in ``sums`` [3][n]; the largest |a - b|, and where it is; the
// edges of a, and of b, as ``look`` has them
SHARED void llamadiff_gaps(const struct tensor *a, const struct tensor *b, int64_t n, int64_t parts, int64_t width,
                    double *sums, double *largest, int64_t *place, double *edges) {
    CALL(gaps, a, b, n, parts, width, sums, largest, place, edges);
}

// Of ``count`` values the sums of the powers two to four of what they are from their mean; where the largest |x| is
SHARED void llamadiff_moments(const float *x, int64_t count, double mean, double *sums, int64_t *place) {
    CALL(moments, x, count, mean, sums, place);
}

#if defined(SEVERAL)
// Floats of blocks of Q4_K, or Q6_K, ``count`` in all
SHARED void llamadiff_q4_k(const void *blocks, float *values, int64_t count) { WIDE(decode_q4_k, blocks, values, count); }
SHARED void llamadiff_q6_k(const void *blocks, float *values, int64_t count) { WIDE(decode_q6_k, blocks, values, count); }
#endif
