// The functions of kernels.c for one instruction set, by which all names end: OF(name).
//
// TARGET has the compiler use it; LANES floats fill a register. A vector wider than a register would be taken apart,
// number by number.

#define INLINE static inline __attribute__((always_inline)) TARGET
#define vector OF(vector)
#define unaligned OF(unaligned)
#define whole OF(whole)
#define bytes OF(bytes)
#define floats OF(floats)
#define doubles OF(doubles)
#define longs OF(longs)

typedef float vector __attribute__((vector_size(4 * LANES)));
typedef float unaligned __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t whole __attribute__((vector_size(4 * LANES)));
typedef uint8_t bytes __attribute__((vector_size(2 * LANES > 32 ? 32 : 2 * LANES)));
typedef float floats __attribute__((vector_size(2 * LANES), aligned(4)));
typedef double doubles __attribute__((vector_size(4 * LANES)));
typedef int64_t longs __attribute__((vector_size(4 * LANES)));

// -- looking at values -----------------------------------------------------------------------------------------------

enum { OF(HALF) = LANES / 2 };
#define WIDER(x) __builtin_convertvector(*(const floats *)(x), doubles)
#define CHOSEN(flags, a, b) ((doubles)(((flags) & (longs)(a)) | (~(flags) & (longs)(b))))

INLINE double OF(sum)(const doubles *x) {
    double total = 0;
    for (int i = 0; i < OF(HALF); i++) total += (*x)[i];
    return total;
}

// Of many values their sum, the smallest and the largest
struct OF(seen) {
    doubles total, low, high;
    double sum;  // of those that fill no vector
};

INLINE struct OF(seen) OF(none)(float first) {
    struct OF(seen) all = {{0}, {0}, {0}, 0};
    all.low += first, all.high += first;
    return all;
}

INLINE void OF(take)(struct OF(seen) *all, doubles some) {
    all->total += some;
    all->high = CHOSEN(some > all->high, some, all->high), all->low = CHOSEN(some < all->low, some, all->low);
}

INLINE void OF(take_one)(struct OF(seen) *all, double value) {
    all->sum += value;
    all->high[0] = value > all->high[0] ? value : all->high[0], all->low[0] = value < all->low[0] ? value : all->low[0];
}

// so many values -> the sum of their squares
INLINE double OF(take_row)(struct OF(seen) *all, const float *values, int64_t count) {
    doubles squares = {0};
    double rest = 0;
    int64_t i = 0;
    for (; i + OF(HALF) <= count; i += OF(HALF)) {
        const doubles some = WIDER(values + i);
        OF(take)(all, some), squares += some * some;
    }
    for (; i < count; i++) OF(take_one)(all, values[i]), rest += (double)values[i] * values[i];
    return OF(sum)(&squares) + rest;
}

INLINE void OF(tell)(const struct OF(seen) *all, double *edges) {
    edges[0] = all->sum + OF(sum)(&all->total), edges[1] = all->low[0], edges[2] = all->high[0];
    for (int i = 1; i < OF(HALF); i++) {
        edges[1] = all->low[i] < edges[1] ? all->low[i] : edges[1];
        edges[2] = all->high[i] > edges[2] ? all->high[i] : edges[2];
    }
}

#if LANES > 4

// -- decoding -------------------------------------------------------------------------------------------------------
// The two types that most files are made of; ggml's own functions for them take up to as long as a product. No step but
// one rounds (a product of 11, 7 and 6 bits is a float), so that all ways to compute it give the same.

// LANES bytes as numbers; compilers of today take many instructions for what is one
INLINE vector OF(numbers)(const int8_t *at) {
    whole all;
#if LANES == 16
    typedef int8_t some __attribute__((vector_size(16), aligned(1)));
    __asm__("vpmovsxbd %1, %0" : "=v"(all) : "m"(*(const some *)at));
#else
    typedef int8_t some __attribute__((vector_size(8), aligned(1)));
    __asm__("vpmovsxbd %1, %0" : "=x"(all) : "m"(*(const some *)at));
#endif
    return __builtin_convertvector(all, vector);
}

// Blocks of 256 weights: their scale and minimum, 8 scales and 8 minima of 6 bits, 128 bytes of 4 bits each
TARGET static void OF(decode_q4_k)(const uint8_t *in, float *out, int64_t count) {
    for (int64_t block = 0; block < count / 256; block++, in += 144) {
        uint32_t packed[3], parts[4];
        uint8_t each[16], q[256] __attribute__((aligned(64)));
        memcpy(packed, in + 4, sizeof packed);
        parts[0] = packed[0] & 0x3f3f3f3f;
        parts[1] = (packed[2] & 0x0f0f0f0f) | (packed[0] >> 6 & 0x03030303) << 4;
        parts[2] = packed[1] & 0x3f3f3f3f;
        parts[3] = (packed[2] >> 4 & 0x0f0f0f0f) | (packed[1] >> 6 & 0x03030303) << 4;
        memcpy(each, parts, sizeof each);
        for (int pair = 0; pair < 4; pair++)
            for (int i = 0; i < 32; i += sizeof(bytes)) {
                bytes some;
                memcpy(&some, in + 16 + 32 * pair + i, sizeof some);
                *(bytes *)(q + 64 * pair + i) = some & 15;
                *(bytes *)(q + 64 * pair + 32 + i) = some >> 4;
            }
        const float d = half(in), dmin = half(in + 2);
        for (int group = 0; group < 8; group++, out += 32) {
            const float scale = d * (float)each[group], min = dmin * (float)each[8 + group];
            for (int i = 0; i < 32; i += LANES)
                *(unaligned *)(out + i) = scale * OF(numbers)((const int8_t *)q + 32 * group + i) - min;
        }
    }
}

// Blocks of 256 weights: 128 bytes of 4 bits each, 64 of 2 bits, 16 scales, and their scale
TARGET static void OF(decode_q6_k)(const uint8_t *in, float *out, int64_t count) {
    for (int64_t block = 0; block < count / 256; block++, in += 210) {
        uint8_t q[256] __attribute__((aligned(64)));
        for (int side = 0; side < 2; side++)
            for (int i = 0; i < 32; i += sizeof(bytes)) {
                bytes low, next, high, *to = (bytes *)(q + 128 * side + i);
                memcpy(&low, in + 64 * side + i, sizeof low);
                memcpy(&next, in + 64 * side + 32 + i, sizeof next);
                memcpy(&high, in + 128 + 32 * side + i, sizeof high);
                to[0] = ((low & 15) | (high & 3) << 4) - 32;
                to[32 / sizeof(bytes)] = ((next & 15) | (high >> 2 & 3) << 4) - 32;
                to[64 / sizeof(bytes)] = (low >> 4 | (high >> 4 & 3) << 4) - 32;
                to[96 / sizeof(bytes)] = (next >> 4 | high >> 6 << 4) - 32;
            }
        const float d = half(in + 208);
        for (int group = 0; group < 16; group++, out += 16) {
            const float scale = d * (float)(int8_t)in[192 + group];
            for (int i = 0; i < 16; i += LANES)
                *(unaligned *)(out + i) = scale * OF(numbers)((const int8_t *)q + 16 * group + i);
        }
    }
}

#endif

// -- rounding to Q8_K -----------------------------------------------------------------------------------------------

// Blocks of 256 through whole numbers from -127 to 127, times a scale: the value of largest magnitude, the first of
// several, becomes -127 (ggml-quants.c, quantize_row_q8_K_ref)
TARGET static void OF(round_q8_k)(const float *x, int64_t count, float *out) {
    for (int64_t block = 0; block < count / 256; block++, x += 256, out += 256) {
        whole above = {0}, below = {0};  // the largest sizes of positive and of negative values, as their bits
        for (int i = 0; i < 256; i += LANES) {
            const whole bits = (whole)*(const unaligned *)(x + i), negative = bits >> 31;
            above = LARGER(bits & ~negative, above), below = LARGER(bits & negative & INT32_MAX, below);
        }
        int32_t most = 0, least = 0;
        for (int i = 0; i < LANES; i++) {
            most = above[i] > most ? above[i] : most;
            least = below[i] > least ? below[i] : least;
        }
        union { int32_t bits; float value; } peak = {most > least ? most : least | INT32_MIN};
        for (int i = 0; most == least && i < 256; i++)
            if (x[i] == peak.value || x[i] == -peak.value) {
                peak.value = x[i];
                break;
            }
        const float inverse = peak.value != 0 ? -127 / peak.value : 0, scale = inverse != 0 ? 1 / inverse : 0;
        const float magic = 0x1.8p23f;  // a float of this size has no room for halves: adding it rounds to the nearest even
        for (int i = 0; i < 256; i += LANES) {
            vector steps = *(const unaligned *)(x + i) * inverse;
            __asm__("" : "+m"(steps));  // a product of its own, not fused with the sum
            *(unaligned *)(out + i) = ((steps + magic) - magic) * scale;
        }
    }
}

// -- what comparing asks of tensors ---------------------------------------------------------------------------------

// Of each row the sum of squares; of all their sum, the smallest and the largest value
TARGET static void OF(look)(const struct tensor *x, int64_t n, int64_t parts, int64_t width, double *squares,
                            double *edges) {
    struct OF(seen) all = OF(none)(x->values[0]);
    for (int64_t row = 0; row < n; row++) {
        squares[row] = 0;
        for (int64_t part = 0; part < parts; part++)
            squares[row] += OF(take_row)(&all, x->values + row * x->row + part * x->part, width);
    }
    OF(tell)(&all, edges);
}

// Of each row the sums of squares of a - b, a and b; the largest |a - b|, and where it is, counted through all rows; the
// edges of a, and of b
TARGET static void OF(gaps)(const struct tensor *a, const struct tensor *b, int64_t n, int64_t parts, int64_t width,
                            double *sums, double *largest, int64_t *place, double *edges) {
    struct OF(seen) every = OF(none)(a->values[0]), others = OF(none)(b->values[0]);
    *largest = -1, *place = 0;
    for (int64_t row = 0; row < n; row++) {
        doubles gaps = {0}, lefts = {0}, rights = {0}, most = {0};
        double rest[3] = {0}, peak = 0;
        for (int64_t part = 0; part < parts; part++) {
            const float *left = a->values + row * a->row + part * a->part;
            const float *right = b->values + row * b->row + part * b->part;
            int64_t i = 0;
            for (; i + OF(HALF) <= width; i += OF(HALF)) {
                const doubles l = WIDER(left + i), r = WIDER(right + i), gap = l - r;
                gaps += gap * gap, lefts += l * l, rights += r * r;
                OF(take)(&every, l), OF(take)(&others, r);
                const doubles size = (doubles)((longs)gap & INT64_MAX);
                most = CHOSEN(size > most, size, most);
            }
            for (; i < width; i++) {
                const double l = left[i], r = right[i], gap = l - r, size = gap < 0 ? -gap : gap;
                rest[0] += gap * gap, rest[1] += l * l, rest[2] += r * r;
                OF(take_one)(&every, l), OF(take_one)(&others, r);
                peak = size > peak ? size : peak;
            }
        }
        sums[row] = OF(sum)(&gaps) + rest[0];
        sums[n + row] = OF(sum)(&lefts) + rest[1], sums[2 * n + row] = OF(sum)(&rights) + rest[2];
        for (int i = 0; i < OF(HALF); i++) peak = most[i] > peak ? most[i] : peak;
        if (peak <= *largest) continue;
        *largest = peak;
        for (int64_t i = 0; i < parts * width; i++) {
            const int64_t at = i / width * a->part + i % width, beside = i / width * b->part + i % width;
            const double gap = (double)a->values[row * a->row + at] - b->values[row * b->row + beside];
            if (gap == peak || gap == -peak) {
                *place = row * parts * width + i;
                break;
            }
        }
    }
    OF(tell)(&every, edges), OF(tell)(&others, edges + 3);
}

// The sums of the powers two to four of x - mean; where the largest |x| is. What is not finite shows in each of the sums
TARGET static void OF(moments)(const float *x, int64_t count, double mean, double *sums, int64_t *place) {
    doubles squares = {0}, cubes = {0}, fourths = {0}, most = {0};
    double rest[3] = {0}, peak = 0;
    int64_t i = 0;
    for (; i + OF(HALF) <= count; i += OF(HALF)) {
        const doubles value = WIDER(x + i), gap = value - mean, square = gap * gap;
        squares += square, cubes += square * gap, fourths += square * square;
        const doubles size = (doubles)((longs)value & INT64_MAX);
        most = CHOSEN(size > most, size, most);
    }
    for (; i < count; i++) {
        const double gap = x[i] - mean, size = x[i] < 0 ? -x[i] : x[i];
        rest[0] += gap * gap, rest[1] += gap * gap * gap, rest[2] += gap * gap * gap * gap;
        peak = size > peak ? size : peak;
    }
    sums[0] = OF(sum)(&squares) + rest[0], sums[1] = OF(sum)(&cubes) + rest[1], sums[2] = OF(sum)(&fourths) + rest[2];
    for (i = 0; i < OF(HALF); i++) peak = most[i] > peak ? most[i] : peak;
    for (*place = 0; *place + 1 < count && x[*place] != peak && -x[*place] != peak;) ++*place;
}

#undef INLINE
#undef vector
#undef unaligned
#undef whole
#undef bytes
#undef floats
#undef doubles
#undef longs
#undef WIDER
#undef CHOSEN
#undef OF
#undef TARGET
#undef LANES
