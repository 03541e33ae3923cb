/* llamadiff's trace writer for C99. SPDX-License-Identifier: MIT. Paste it anywhere.
 *
 * Records what an engine computes, its tensors ("taps"), in one .safetensors file:
 *
 *     trace_writer trace;
 *     trace_begin(&trace, "mine.safetensors", tokens, n_tokens);             the prompt's ids
 *     trace_state(&trace, "name", "my engine");                              what is known of the run
 *     trace_add(&trace, "Qcur_rope-0", q, (int64_t[]){n_tokens, n_heads, head_dim}, 3);
 *     trace_add_tokens(&trace, &next, 1);                                    a decode step: its id,
 *     trace_add(&trace, "Qcur_rope-0", q, (int64_t[]){1, n_heads, head_dim}, 3);  and its row below those before
 *     if (trace_end(&trace) != 0) fprintf(stderr, "%s\n", trace.message);
 *
 * Errors stick: every call returns 0, or -1 once anything has failed, so the end's result speaks for all. Values are
 * copied and kept in memory until the end, which frees it: call it always. It writes path.part and renames it to path:
 * a trace of before is replaced, and a run that breaks off leaves it as it was. */
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the file is little-endian and this machine is not: swap the bytes of the values in trace_add_as"
#endif

typedef struct trace_part { /* what one call added */
    struct trace_part *next, *more, *last; /* the next tap; further rows of this one, and the last of them */
    char name[128];
    const char *dtype;
    size_t size; /* bytes of a value */
    int64_t dims[8];
    int n_dims;
    char values[]; /* in C order */
} trace_part;
typedef struct { char *text; size_t size; } trace_text;
typedef struct {
    char message[512]; /* the first error; empty if there was none */
    char path[4096], part[4096 + 8], name[128];
    size_t n_tokens, n_prompt;
    trace_text tokens, facts[5]; /* of the run, the producer, its settings and hyper-parameters, the model */
    trace_part *first, *last;
} trace_writer;

static int trace_fail(trace_writer *w, const char *format, ...)
{
    va_list values;
    va_start(values, format);
    if (w->message[0] == '\0') vsnprintf(w->message, sizeof w->message, format, values);
    va_end(values);
    return -1;
}

static int trace_print_list(trace_writer *w, trace_text *to, const char *format, va_list values)
{
    va_list again;
    va_copy(again, values);
    const int n = vsnprintf(NULL, 0, format, values);
    char *text = n < 0 ? NULL : (char *)realloc(to->text, to->size + (size_t)n + 1);
    if (text != NULL) vsnprintf(text + to->size, (size_t)n + 1, format, again), to->text = text, to->size += (size_t)n;
    va_end(again);
    return text == NULL ? trace_fail(w, "%s: out of memory", w->path) : 0;
}

static int trace_print(trace_writer *w, trace_text *to, const char *format, ...)
{
    va_list values;
    va_start(values, format);
    const int failed = trace_print_list(w, to, format, values);
    va_end(values);
    return failed;
}

static void trace_quote(trace_writer *w, trace_text *to, const char *text) /* UTF-8 as a string of JSON */
{
    trace_print(w, to, "\"");
    for (; *text != '\0'; text++) {
        const unsigned char c = (unsigned char)*text;
        trace_print(w, to, c < ' ' ? "\\u%04x" : c == '"' || c == '\\' ? "\\%c" : "%c", c);
    }
    trace_print(w, to, "\"");
}

/* The ids that a decode step runs. */
int trace_add_tokens(trace_writer *w, const int32_t *tokens, size_t n)
{
    for (size_t i = 0; i < n; i++, w->n_tokens++) {
        if (tokens[i] < 0) trace_fail(w, "%s: token %zu is %" PRId32 ", no token id", w->path, w->n_tokens, tokens[i]);
        trace_print(w, &w->tokens, "%s%" PRId32, w->n_tokens ? "," : "", tokens[i]);
    }
    return w->message[0] ? -1 : 0;
}

/* Begin the trace of a run of these tokens: the prompt's; those of decode steps may follow. */
int trace_begin(trace_writer *w, const char *path, const int32_t *tokens, size_t n_tokens)
{
    memset(w, 0, sizeof *w);
    if (strlen(path) >= sizeof w->path) return trace_fail(w, "%.200s...: the path is too long", path);
    strcpy(w->path, path);
    snprintf(w->part, sizeof w->part, "%s.part", w->path);
    w->n_prompt = n_tokens;
    return n_tokens == 0 ? trace_fail(w, "%s: the trace has no tokens", path) : trace_add_tokens(w, tokens, n_tokens);
}

/* State what is known of the run, as JSON: name, version, prompt, n_prefill (how many tokens were run in one go; the
 * prompt's, if not stated), positions ([0,1,2]), batches (how many ran at a time, if not one by one after the prompt),
 * settings.type_k and type_v (how the cache keeps rows: "F16"), settings.flash_attn (true),
 * hyperparameters.rope.freq_base (and others of GGUF's keys), model.file, model.sha256. */
int trace_state_json(trace_writer *w, const char *key, const char *format, ...)
{
    static const char *const keys[] = {"prompt", "n_prefill", "positions", "batches", "name", "version",
                                       "settings.", "hyperparameters.", "model."}; /* the last three: prefixes */
    static const int groups[] = {0, 0, 0, 0, 1, 1, 2, 3, 4};
    int i = 0;
    while (i < 9 && (i < 6 ? strcmp(key, keys[i]) != 0 : strncmp(key, keys[i], strlen(keys[i])) != 0)) i++;
    if (i == 9) return trace_fail(w, "%s: nothing is stated by that name", key);
    trace_text name = {NULL, 0}, *fact = &w->facts[groups[i]];
    trace_quote(w, &name, i < 6 ? key : key + strlen(keys[i]));
    trace_print(w, &name, ":");
    if (fact->text && name.text && strstr(fact->text, name.text)) trace_fail(w, "%s: stated twice", key);
    trace_print(w, fact, ",%s", name.text ? name.text : "");
    free(name.text);
    va_list values;
    va_start(values, format);
    trace_print_list(w, fact, format, values);
    va_end(values);
    return w->message[0] ? -1 : 0;
}

/* The same for text. */
int trace_state(trace_writer *w, const char *key, const char *text)
{
    trace_text quoted = {NULL, 0};
    trace_quote(w, &quoted, text);
    trace_state_json(w, key, "%s", quoted.text ? quoted.text : "");
    free(quoted.text);
    return w->message[0] ? -1 : 0;
}

/* A tap's name in a layer, until the next call: trace_name(&trace, "l_out", 3) is "l_out-3". */
const char *trace_name(trace_writer *w, const char *word, int layer)
{
    snprintf(w->name, sizeof w->name, "%s-%d", word, layer);
    return w->name;
}

/* The axis of a tap that runs over tokens: [head, query, ...] has it second, whatever else is recorded first. */
static int trace_axis(const trace_part *tap)
{
    static const char *const by_head[] = {"kq-", "kq_soft_max-", "kqv-", "kqv_mla-", "q_nope_absorbed-"};
    for (int i = 0; i < 5; i++)
        if (tap->n_dims == 3 && strncmp(tap->name, by_head[i], strlen(by_head[i])) == 0) return 1;
    return 0;
}

/* Add the rows of a tap: the dims, outermost first, and the values without gaps (C order). Rows that are added under
 * the same name go below those before; scores may see more keys each time, and keys not yet seen are zero.
 * dtype: F64, F32, F16, BF16 or I32, and the values are of that type. */
int trace_add_as(trace_writer *w, const char *name, const char *dtype, const void *values, const int64_t *shape,
                 int n_dims)
{
    static const char *const types[] = {"F64", "F32", "F16", "BF16", "I32"};
    static const size_t sizes[] = {8, 4, 2, 2, 4};
    int type = 0;
    while (type < 5 && strcmp(types[type], dtype) != 0) type++;
    if (type == 5) return trace_fail(w, "%s: type %s; F64, F32, F16, BF16 and I32 are possible", name, dtype);
    if (strlen(name) < 1 || strlen(name) > 127 || strcmp(name, "__metadata__") == 0)
        return trace_fail(w, "\"%.200s\" is no name of a tap", name);
    if (n_dims < 1 || n_dims > 8) return trace_fail(w, "%s: %d dims; 1 to 8 of at least 1 are possible", name, n_dims);
    size_t bytes = sizes[type];
    for (int i = 0; i < n_dims; i++) {
        if (shape[i] < 1 || shape[i] > (int64_t)(PTRDIFF_MAX / 2 / bytes))
            return trace_fail(w, "%s: dim %d is %" PRId64 "; 1 to 8 of at least 1 are possible", name, i, shape[i]);
        bytes *= (size_t)shape[i];
    }
    if (w->tokens.text == NULL) trace_fail(w, "%s: the trace has ended", w->path);
    if (w->message[0]) return -1;
    trace_part *part = (trace_part *)calloc(1, sizeof *part + bytes), *tap = w->first;
    if (part == NULL) return trace_fail(w, "%s: out of memory", name);
    strcpy(part->name, name);
    memcpy(part->dims, shape, (size_t)n_dims * sizeof *shape);
    memcpy(part->values, values, bytes);
    part->dtype = types[type], part->size = sizes[type], part->n_dims = n_dims, part->last = part;
    while (tap != NULL && strcmp(tap->name, name) != 0) tap = tap->next;
    if (tap == NULL) {
        *(w->last ? &w->last->next : &w->first) = part;
        w->last = part;
        return 0;
    }
    int fits = tap->dtype == part->dtype && tap->n_dims == n_dims;
    for (int i = 0; fits && i < n_dims; i++)
        fits = i == trace_axis(tap) || (trace_axis(tap) == 1 && i == 2) || tap->dims[i] == shape[i];
    tap->last->more = part; /* freed with the others */
    tap->last = part;
    return fits ? 0 : trace_fail(w, "%s: rows of another type or shape cannot follow those before", name);
}

/* The same for float. */
int trace_add(trace_writer *w, const char *name, const float *values, const int64_t *shape, int n_dims)
{
    return trace_add_as(w, name, "F32", values, shape, n_dims);
}

static int64_t trace_product(const int64_t *dims, int from, int to)
{
    int64_t product = 1;
    for (int i = from; i < to; i++) product *= dims[i];
    return product;
}

/* The dims of a tap with all its rows. */
static void trace_whole(const trace_part *tap, int64_t *dims)
{
    const int axis = trace_axis(tap);
    memcpy(dims, tap->dims, sizeof tap->dims);
    for (const trace_part *part = tap->more; part != NULL; part = part->more) {
        dims[axis] += part->dims[axis];
        if (axis == 1 && part->dims[2] > dims[2]) dims[2] = part->dims[2];
    }
}

static void trace_object(trace_writer *w, trace_text *to, const char *key, const trace_text *facts)
{
    if (facts->text != NULL) trace_print(w, to, ",\"%s\":{%s}", key, facts->text + 1);
}

static void trace_header(trace_writer *w, trace_text *header)
{
    const char *run = w->facts[0].text ? w->facts[0].text : "", *who = w->facts[1].text ? w->facts[1].text : "";
    trace_text info = {NULL, 0};
    trace_print(w, &info, "{\"schema\":\"llamadiff.trace/1\",\"tokens\":[%s]%s", w->tokens.text, run);
    if (w->n_tokens > w->n_prompt && !strstr(run, "\"n_prefill\":"))
        trace_print(w, &info, ",\"n_prefill\":%zu", w->n_prompt);
    trace_print(w, &info, ",\"producer\":{\"writer\":\"c\"%s", who);
    trace_object(w, &info, "settings", &w->facts[2]);
    trace_object(w, &info, "hyperparameters", &w->facts[3]);
    trace_print(w, &info, "}");
    trace_object(w, &info, "model", &w->facts[4]);
    trace_print(w, &info, "}");
    trace_print(w, header, "{\"__metadata__\":{\"llamadiff\":");
    trace_quote(w, header, info.text ? info.text : ""); /* JSON in a string of JSON */
    trace_print(w, header, "}");
    free(info.text);
    uint64_t end = 0;
    for (const trace_part *tap = w->first; tap != NULL; tap = tap->next) {
        int64_t dims[8];
        trace_whole(tap, dims);
        trace_print(w, header, ",");
        trace_quote(w, header, tap->name);
        trace_print(w, header, ":{\"dtype\":\"%s\",\"shape\":", tap->dtype);
        for (int i = 0; i < tap->n_dims; i++) trace_print(w, header, "%s%" PRId64, i ? "," : "[", dims[i]);
        const uint64_t start = end;
        end += (uint64_t)trace_product(dims, 0, tap->n_dims) * tap->size;
        trace_print(w, header, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", start, end);
    }
    trace_print(w, header, "}%*s", (int)(7 - header->size % 8), ""); /* to a multiple of 8 */
}

/* The rows of a tap, part below part, for each head; what a row is shorter than the longest is zero. */
static int trace_values(const trace_part *tap, FILE *file)
{
    int64_t dims[8];
    trace_whole(tap, dims);
    const int axis = trace_axis(tap);
    const size_t longest = (size_t)trace_product(dims, axis + 1, tap->n_dims) * tap->size;
    for (int64_t head = 0; head < trace_product(dims, 0, axis); head++)
        for (const trace_part *part = tap; part != NULL; part = part->more) {
            const size_t row = (size_t)trace_product(part->dims, axis + 1, part->n_dims) * part->size;
            for (int64_t i = 0; i < part->dims[axis]; i++) {
                if (fwrite(part->values + (head * part->dims[axis] + i) * (int64_t)row, 1, row, file) != row) return 0;
                for (size_t rest = row; rest < longest; rest++)
                    if (putc(0, file) == EOF) return 0;
            }
        }
    return 1;
}

static int trace_file(trace_writer *w, const trace_text *header)
{
    FILE *file = fopen(w->part, "wb");
    if (file == NULL) return trace_fail(w, "%s: cannot be written (%s)", w->part, strerror(errno));
    unsigned char length[8];
    for (int i = 0; i < 8; i++) length[i] = (unsigned char)((uint64_t)header->size >> 8 * i);
    int good = fwrite(length, 1, 8, file) == 8 && fwrite(header->text, 1, header->size, file) == header->size;
    for (const trace_part *tap = w->first; good && tap != NULL; tap = tap->next) good = trace_values(tap, file);
    good = fflush(file) == 0 && good;
    if (!good) trace_fail(w, "%s: cannot be written (%s)", w->part, strerror(errno));
    fclose(file);
#ifdef _WIN32
    if (good) remove(w->path); /* rename replaces a file everywhere else */
#endif
    if (good && rename(w->part, w->path) != 0) trace_fail(w, "%s: cannot be written (%s)", w->path, strerror(errno));
    if (w->message[0]) remove(w->part);
    return w->message[0] ? -1 : 0;
}

/* Write the file, and free the memory. */
int trace_end(trace_writer *w)
{
    trace_text header = {NULL, 0};
    if (w->tokens.text == NULL) trace_fail(w, "%s: the trace has ended", w->path);
    if (w->message[0] == '\0') trace_header(w, &header);
    if (w->message[0] == '\0') trace_file(w, &header);
    for (trace_part *tap = w->first, *next; tap != NULL; tap = next) {
        next = tap->next;
        for (trace_part *part = tap, *more; part != NULL; part = more) more = part->more, free(part);
    }
    for (int i = 0; i < 5; i++) free(w->facts[i].text), w->facts[i].text = NULL;
    free(header.text), free(w->tokens.text);
    w->tokens.text = NULL, w->first = w->last = NULL;
    return w->message[0] ? -1 : 0;
}
