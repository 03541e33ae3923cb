/* llamadiff's trace writer for C99 and C++. SPDX-License-Identifier: MIT. Paste it anywhere.
 *
 * Records what an engine computes, float32 tensors ("taps") in one .safetensors file:
 *
 *     trace_writer w;
 *     trace_begin(&w, "mine.safetensors", tokens, n_tokens);
 *     const int64_t shape[] = {n_tokens, n_heads, head_dim};
 *     trace_add(&w, "Qcur_rope-0", q, shape, 3);
 *     if (trace_end(&w) != 0) fprintf(stderr, "%s\n", w.message);
 *
 * Errors stick: every call returns 0, or -1 once anything has failed, so the end's result speaks for all. The values
 * are written when they are added, to path.part; it is renamed at the end, so a run that breaks off leaves no trace.
 *
 *     8 bytes                length of the header, little-endian
 *     TRACE_HEADER_BYTES     the header: JSON, padded with spaces; its place is kept free and written last
 *     the rest               the values, in the order they came
 *
 * Decode steps: a tap is added once and has one row for each token, the prompt's and then the steps'. Keep each tap's
 * rows until the last token is known, then begin with all tokens and add. Scores are [head, query, key], and zero for
 * the keys that came after the query. */
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the file is little-endian and this machine is not: swap the bytes of the values in trace_add"
#endif

#ifndef TRACE_HEADER_BYTES
#define TRACE_HEADER_BYTES (1 << 20) /* enough for 10000 taps; a multiple of 8 */
#endif
#define TRACE_MAX_NAME 256

typedef struct {
    char message[512]; /* the first error; empty if there was none */
    char path[4096], part[4096 + 8];
    int has_part; /* path.part exists and is ours */
    FILE *file;   /* NULL once closed */
    char *header; /* text so far, always terminated */
    size_t header_size;
    uint64_t data_size;
} trace_writer;

/* Keep the first error, and nothing else. */
static int trace_fail(trace_writer *w, const char *format, ...)
{
    va_list values;
    va_start(values, format);
    if (w->message[0] == '\0') vsnprintf(w->message, sizeof w->message, format, values);
    va_end(values);
    if (w->file != NULL) fclose(w->file);
    if (w->has_part) remove(w->part);
    free(w->header);
    w->file = NULL, w->header = NULL, w->has_part = 0;
    return -1;
}

/* Append to the header's text. Returns non-zero if it is full. */
static int trace_print(trace_writer *w, const char *format, ...)
{
    const size_t room = TRACE_HEADER_BYTES - w->header_size;
    va_list values;
    va_start(values, format);
    const int n = vsnprintf(w->header + w->header_size, room, format, values);
    va_end(values);
    if (n < 0 || (size_t)n >= room) return 1;
    w->header_size += (size_t)n;
    return 0;
}

/* The name as a key, "name":{ with backslashes escaped. Returns non-zero if it is no name. */
static int trace_key(char *key, const char *name)
{
    const size_t n = strlen(name);
    if (n < 1 || n > TRACE_MAX_NAME) return 1;
    *key++ = '"';
    for (; *name != '\0'; name++) {
        if (*name < ' ' || *name > '~' || *name == '"') return 1;
        if (*name == '\\') *key++ = '\\';
        *key++ = *name;
    }
    strcpy(key, "\":{");
    return 0;
}

/* Begin the trace of a run of these tokens. */
int trace_begin(trace_writer *w, const char *path, const int32_t *tokens, size_t n_tokens)
{
    memset(w, 0, sizeof *w);
    if (strlen(path) >= sizeof w->path) return trace_fail(w, "%.200s...: the path is too long", path);
    if (n_tokens == 0) return trace_fail(w, "%s: the trace has no tokens", path);
    strcpy(w->path, path);
    snprintf(w->part, sizeof w->part, "%s.part", w->path);
    w->header = (char *)malloc(TRACE_HEADER_BYTES);
    if (w->header == NULL) return trace_fail(w, "%s: out of memory", path);

    int full = trace_print(w, "{\"__metadata__\":{\"llamadiff\":\"%s", /* JSON in a JSON string */
                           "{\\\"schema\\\":\\\"llamadiff.trace/1\\\",\\\"tokens\\\":[");
    for (size_t i = 0; i < n_tokens; i++) {
        if (tokens[i] < 0) return trace_fail(w, "%s: token %zu is %" PRId32 ", no token id", path, i, tokens[i]);
        full |= trace_print(w, "%s%" PRId32, i ? "," : "", tokens[i]);
    }
    full |= trace_print(w, "]}\"}");
    if (full) return trace_fail(w, "%s: too many tokens; raise TRACE_HEADER_BYTES", path);

    w->file = fopen(w->part, "wb");
    w->has_part = w->file != NULL;
    if (w->file == NULL || fseek(w->file, 8 + TRACE_HEADER_BYTES, SEEK_SET) != 0)
        return trace_fail(w, "%s: cannot be written (%s)", w->part, strerror(errno));
    return 0;
}

/* Write a tap: n_dims dims, outermost first, values without gaps (C order). */
int trace_add(trace_writer *w, const char *name, const float *values, const int64_t *shape, int n_dims)
{
    if (w->file == NULL) return trace_fail(w, "%s: added to a trace that has ended", name);
    char key[2 * TRACE_MAX_NAME + 8];
    if (trace_key(key, name) != 0)
        return trace_fail(w, "\"%s\": a name is 1 to 256 characters of printable ASCII without quotes", name);
    if (strstr(w->header, key) != NULL) /* no name has quotes: only a whole key can match */
        return trace_fail(w, "%s: added twice; add the rows of all steps in one call", name);

    if (n_dims < 1 || n_dims > 8) return trace_fail(w, "%s: has %d dims; 1 to 8 are possible", name, n_dims);
    int full = trace_print(w, ",%s\"dtype\":\"F32\",\"shape\":[", key);
    int64_t count = 1;
    for (int i = 0; i < n_dims; i++) {
        if (shape[i] < 1 || shape[i] > PTRDIFF_MAX / 4 / count)
            return trace_fail(w, "%s: dim %d is %" PRId64 "; dims are at least 1 and fit memory", name, i, shape[i]);
        count *= shape[i];
        full |= trace_print(w, "%s%" PRId64, i ? "," : "", shape[i]);
    }
    const uint64_t start = w->data_size, end = start + 4 * (uint64_t)count;
    full |= trace_print(w, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", start, end);
    if (full) return trace_fail(w, "%s: too many taps, the header is full; raise TRACE_HEADER_BYTES", name);

    if (fwrite(values, 4, (size_t)count, w->file) != (size_t)count)
        return trace_fail(w, "%s: cannot be written (%s)", w->part, strerror(errno));
    w->data_size = end;
    return 0;
}

/* Write the header and give the file its name. */
int trace_end(trace_writer *w)
{
    if (w->file == NULL) return trace_fail(w, "%s: the trace has ended before", w->path);
    if (trace_print(w, "}") != 0) return trace_fail(w, "%s: the header is full; raise TRACE_HEADER_BYTES", w->path);
    memset(w->header + w->header_size, ' ', TRACE_HEADER_BYTES - w->header_size);
    unsigned char length[8];
    for (int i = 0; i < 8; i++) length[i] = (unsigned char)((uint64_t)TRACE_HEADER_BYTES >> 8 * i);

    const int written = fseek(w->file, 0, SEEK_SET) == 0 && fwrite(length, 1, 8, w->file) == 8 &&
                        fwrite(w->header, 1, TRACE_HEADER_BYTES, w->file) == TRACE_HEADER_BYTES && fflush(w->file) == 0;
    if (!written) return trace_fail(w, "%s: cannot be written (%s)", w->part, strerror(errno));
    FILE *file = w->file;
    w->file = NULL;
#ifdef _WIN32
    remove(w->path); /* rename replaces a file everywhere else */
#endif
    if (fclose(file) != 0 || rename(w->part, w->path) != 0)
        return trace_fail(w, "%s: cannot be written (%s)", w->path, strerror(errno));
    free(w->header);
    w->header = NULL, w->has_part = 0;
    return 0;
}
