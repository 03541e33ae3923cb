// The functions of kernels.c for one instruction set, by which all names end: OF(name).
//
// TARGET has the compiler use it; LANES floats fill a register. TILE_ROWS and TILE_VECTORS are the sizes of a product whose
// sums stay in registers; without them there are no products. A vector wider than a register would be taken apart, number
// by number.

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

#if defined(TILE_ROWS)

// -- decoding -------------------------------------------------------------------------------------------------------
// The two types that most files are made of; ggml's own functions for them take up to as long as the product. No step but
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
INLINE void OF(q4_k)(const uint8_t *in, float *out, int64_t count) {
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
INLINE void OF(q6_k)(const uint8_t *in, float *out, int64_t count) {
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

TARGET static void OF(decode_q4_k)(const void *blocks, float *values, int64_t count) { OF(q4_k)(blocks, values, count); }
TARGET static void OF(decode_q6_k)(const void *blocks, float *values, int64_t count) { OF(q6_k)(blocks, values, count); }

// -- products -------------------------------------------------------------------------------------------------------

// acc [rows][n] += w [rows][STRIDE] x [depth][columns], of TILE_ROWS rows and so many vectors
INLINE void OF(tile)(const float *w, const float *x, int64_t columns, float *acc, int64_t n, int64_t depth,
                     const int vectors) {
    vector sums[TILE_ROWS][TILE_VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < TILE_ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) sums[r][v] = (vector){0};
    for (int64_t k = 0; k < depth; k++) {
        vector column[TILE_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) column[v] = *(const unaligned *)(x + k * columns + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < TILE_ROWS; r++)
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) sums[r][v] += w[r * STRIDE + k] * column[v];
    }
#pragma GCC unroll 8
    for (int r = 0; r < TILE_ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) *(unaligned *)(acc + r * n + v * LANES) += sums[r][v];
}

// acc [ROWS][n] += w [ROWS][STRIDE] x [depth][columns]
INLINE void OF(panel)(const float *w, const float *x, int64_t columns, float *acc, int64_t n, int64_t depth) {
    for (int64_t at = 0; at < columns;) {
        const int64_t left = (columns - at) / LANES, vectors = left < TILE_VECTORS ? left : TILE_VECTORS;
        for (int r = 0; r < ROWS; r += TILE_ROWS) {
            const float *some = w + r * STRIDE, *from = x + at;
            float *to = acc + r * n + at;
            if (vectors == TILE_VECTORS) OF(tile)(some, from, columns, to, n, depth, TILE_VECTORS);
            else if (vectors == 2) OF(tile)(some, from, columns, to, n, depth, 2);
            else OF(tile)(some, from, columns, to, n, depth, 1);
        }
        at += vectors * LANES;
    }
}

// z [depth][WIDTH] += w^T [depth][ROWS] c [ROWS][WIDTH], 8 registers of z at once; ``first``: z held nothing
INLINE void OF(across)(const float *w, const float *c, float *z, int64_t depth, int first) {
    enum { EACH = WIDTH / LANES, SOME = 8 / EACH };
    for (int64_t k = 0; k < depth; k += SOME) {
        vector sums[SOME][EACH];
#pragma GCC unroll 8
        for (int i = 0; i < SOME; i++)
#pragma GCC unroll 4
            for (int v = 0; v < EACH; v++) sums[i][v] = (vector){0};
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
            for (int i = 0; i < SOME; i++)
#pragma GCC unroll 4
                for (int v = 0; v < EACH; v++)
                    sums[i][v] += w[r * STRIDE + k + i] * *(const unaligned *)(c + r * WIDTH + v * LANES);
        for (int i = 0; i < SOME && k + i < depth; i++)
            for (int v = 0; v < EACH; v++) {
                unaligned *to = (unaligned *)(z + (k + i) * WIDTH + v * LANES);
                *to = first ? sums[i][v] : *to + sums[i][v];
            }
    }
}

// a piece of some rows as floats; zeros for rows beyond the last
INLINE void OF(piece)(const struct product *p, int64_t row, int64_t from, int64_t depth, float *w) {
    for (int64_t r = 0; r < ROWS; r++) {
        float *to = w + r * STRIDE;
        const uint8_t *blocks = p->rows + (row + r) * p->row_bytes + from / p->values * p->size;
        if (row + r >= p->n_out) memset(to, 0, DEPTH * sizeof(float));
        else if (p->decode == llamadiff_q4_k) OF(q4_k)(blocks, to, depth);
        else if (p->decode == llamadiff_q6_k) OF(q6_k)(blocks, to, depth);
        else if (p->decode) p->decode(blocks, to, depth);
        else memcpy(to, blocks, depth * sizeof(float));
    }
}

// the units that no other thread has begun; ``room`` is w, c, and acc
TARGET static void OF(multiply)(const struct product *p, int64_t *next, float *room) {
    float *w = room, *c = w + ROWS * STRIDE, *acc = c + ROWS * WIDTH;
    const int64_t units = (p->n_out + p->unit - 1) / p->unit;
    struct OF(seen) all = OF(none)(p->squares ? *(const float *)p->rows : 0);
    for (int64_t unit; (unit = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)) < units;) {
        const int64_t first = unit * p->unit, last = first + p->unit < p->n_out ? first + p->unit : p->n_out;
        float *z = p->c ? p->z + unit * p->n_in * WIDTH : NULL;
        for (int64_t row = first; row < last; row += ROWS) {
            const int64_t count = last - row < ROWS ? last - row : ROWS;
            memset(acc, 0, ROWS * p->n * sizeof(float));
            if (p->c) {
                memcpy(c, p->c + row * WIDTH, count * WIDTH * sizeof(float));
                memset(c + count * WIDTH, 0, (ROWS - count) * WIDTH * sizeof(float));
            }
            for (int64_t from = 0; from < p->n_in; from += DEPTH) {
                const int64_t depth = p->n_in - from < DEPTH ? p->n_in - from : DEPTH;
                OF(piece)(p, row, from, depth, w);
                for (int64_t r = 0; p->squares && r < count; r++) {
                    const double some = OF(take_row)(&all, w + r * STRIDE, depth);
                    p->squares[row + r] = from ? p->squares[row + r] + some : some;
                }
                for (int64_t at = 0; at < p->n; at += PANEL) {
                    const int64_t columns = p->n - at < PANEL ? p->n - at : PANEL;
                    OF(panel)(w, p->x + at * p->n_in + from * columns, columns, acc + at, p->n, depth);
                }
                if (p->c) OF(across)(w, c, z + from * WIDTH, depth, row == first);
            }
            for (int64_t t = 0; t < p->used; t++)
                for (int64_t r = 0; r < count; r++) p->y[t * p->n_out + row + r] = acc[r * p->n + t];
        }
    }
    if (p->squares) OF(tell)(&all, p->edges);
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

// -- maths ----------------------------------------------------------------------------------------------------------

// so many values, and ``rest`` in the lanes beyond them
INLINE vector OF(some)(const float *at, int64_t count, float rest) {
    vector values = {0};
    values += rest;
    if (count >= LANES) return *(const unaligned *)at;
    for (int64_t i = 0; i < count; i++) values[i] = at[i];
    return values;
}

INLINE void OF(put)(float *at, int64_t count, vector values) {
    if (count >= LANES) *(unaligned *)at = values;
    else for (int64_t i = 0; i < count; i++) at[i] = values[i];
}

// e^x of numbers that are not positive; 0 where it is below float32's normal numbers. x = n ln 2 + r, and Taylor's series of
// e^r has no more than a third of a last digit left after 7 terms.
INLINE vector OF(exp)(vector x) {
    const float magic = 0x1.8p23f;  // a float of this size has no room for halves: adding it rounds to the nearest even
    const whole kept = ~(x < -87.0f);  // NaN is
    const vector turned = x * 0x1.715476p0f + magic, n = turned - magic;
    const vector r = (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;  // ln 2 in two parts: the first times n is exact
    vector sum = r * (1 / 5040.f) + 1 / 720.f;
    sum = sum * r + 1 / 120.f;
    sum = sum * r + 1 / 24.f;
    sum = sum * r + 1 / 6.f;
    sum = sum * r + 0.5f;
    sum = sum * r + 1;
    sum = sum * r + 1;
    const whole power = ((whole)turned << 23) + (127 << 23);  // 2^n: the low bits of ``turned`` are n
    return (vector)((whole)(sum * (vector)power) & kept);
}

// exp(scale x - max) / sum of [heads][queries][keys], over the first seen[query] keys of each row; the others are 0
TARGET static void OF(softmax)(const float *x, int64_t heads, int64_t queries, int64_t keys, const int64_t *seen,
                               float scale, float *out) {
    for (int64_t row = 0; row < heads * queries; row++, x += keys, out += keys) {
        const int64_t count = seen[row % queries];
        vector most = {0};
        most -= INFINITY;
        for (int64_t i = 0; i < count; i += LANES) {
            const vector scaled = OF(some)(x + i, count - i, x[0]) * scale;
            const whole larger = scaled > most;
            most = (vector)((larger & (whole)scaled) | (~larger & (whole)most));
        }
        float peak = most[0];
        for (int i = 1; i < LANES; i++) peak = most[i] > peak ? most[i] : peak;
        doubles sums = {0};
        double sum = 0;
        for (int64_t i = 0; i < count; i += LANES) {
            OF(put)(out + i, count - i, OF(exp)(OF(some)(x + i, count - i, x[0]) * scale - peak));
            if (count - i >= LANES) sums += WIDER(out + i) + WIDER(out + i + OF(HALF));
            else for (int64_t k = i; k < count; k++) sum += out[k];
        }
        const float share = (float)(1 / (sum + OF(sum)(&sums)));
        for (int64_t i = 0; i < count; i++) out[i] *= share;
        for (int64_t i = count; i < keys; i++) out[i] = 0 * share;  // NaN, as NumPy has it, where the sum is no number
    }
}

// gate / (1 + exp(-gate)) * up
TARGET static void OF(swiglu)(const float *gate, const float *up, int64_t count, float *out) {
    for (int64_t i = 0; i < count; i += LANES) {
        const vector g = OF(some)(gate + i, count - i, 0), u = OF(some)(up + i, count - i, 0);
        const vector e = OF(exp)((vector)((whole)g | INT32_MIN)), one = e * 0 + 1;  // exp(-|gate|) never overflows
        const whole below = (whole)g >> 31;
        const vector above = (vector)((below & (whole)e) | (~below & (whole)one));
        OF(put)(out + i, count - i, g * (above / (1 + e)) * u);
    }
}

// x / sqrt(mean(x^2) + eps) * weight of n rows
TARGET static void OF(rms_norm)(const float *x, int64_t n, int64_t width, const float *weight, double eps, float *out) {
    for (int64_t row = 0; row < n; row++, x += width, out += width) {
        doubles squares = {0};
        double sum = 0;
        int64_t i = 0;
        for (; i + OF(HALF) <= width; i += OF(HALF)) squares += WIDER(x + i) * WIDER(x + i);
        for (; i < width; i++) sum += (double)x[i] * x[i];
        const double share = 1 / sqrt((sum + OF(sum)(&squares)) / width + eps);
        for (i = 0; i < width; i++) out[i] = (float)(x[i] * share * weight[i]);
    }
}

// Turn pairs of each head of [n][heads][width] by angles [n][turned]: values 2i and 2i + 1, or i and i + turned
TARGET static void OF(rope)(const float *x, int64_t n, int64_t heads, int64_t width, int64_t turned, int neighbours,
                            const double *cos, const double *sin, float *out) {
    for (int64_t row = 0; row < n; row++, cos += turned, sin += turned)
        for (int64_t head = 0; head < heads; head++, x += width, out += width) {
            if (neighbours)
                for (int64_t i = 0; i < turned; i++) {
                    const double a = x[2 * i], b = x[2 * i + 1];
                    out[2 * i] = (float)(a * cos[i] - b * sin[i]), out[2 * i + 1] = (float)(a * sin[i] + b * cos[i]);
                }
            else
                for (int64_t i = 0; i < turned; i++) {
                    const double a = x[i], b = x[i + turned];
                    out[i] = (float)(a * cos[i] - b * sin[i]), out[i + turned] = (float)(a * sin[i] + b * cos[i]);
                }
            for (int64_t i = 2 * turned; i < width; i++) out[i] = x[i];
        }
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
#undef TILE_ROWS
#undef TILE_VECTORS
