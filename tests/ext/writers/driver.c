/* driver OUT TOKENS VALUES SCRIPT: does what each line of a script says, with values from a file; see test_writers.py. */
#include "trace_writer.c"

static char bytes[1 << 19], words[1 << 21];

/* The whole numbers of a text such as 2x3 or 1,17,5. */
static int numbers(char *text, int64_t *into)
{
    int n = 0;
    for (char *word = text; word != NULL && *word != '\0' && n < 64; n++) {
        into[n] = strtoll(word, &word, 10);
        word += *word == 'x' || *word == ',';
    }
    return n;
}

static int ids_of(char *text, int32_t *ids)
{
    int64_t wide[64];
    const int n = numbers(text, wide);
    for (int i = 0; i < n; i++) ids[i] = (int32_t)wide[i];
    return n;
}

static size_t read_all(const char *path, char *into, size_t room)
{
    FILE *file = fopen(path, "rb");
    if (file == NULL) exit(3);
    const size_t size = fread(into, 1, room - 1, file);
    fclose(file);
    return size;
}

static void lines(trace_writer *to)
{
    const int64_t n_tokens = 2, n_keys = 2;
    trace_writer trace = *to;
    /* LINES */
    *to = trace;
    (void)n_tokens, (void)n_keys;
}

int main(int argc, char **argv)
{
    int32_t ids[64];
    int64_t shape[64];
    trace_writer w;
    const char *next = bytes;
    if (argc < 5) return 3;
    read_all(argv[3], bytes, sizeof bytes);
    read_all(argv[4], words, sizeof words);
    const int n = ids_of(argv[2], ids);
    trace_begin(&w, argv[1], ids, (size_t)n);
    for (char *line = words, *end; *line != '\0'; line = end + 1) {
        end = strchr(line, '\n');
        *end = '\0';
        char *parts[4] = {line, "", "", ""};
        for (int i = 1; i < 4 && (line = strchr(parts[i - 1], '\t')) != NULL; i++) *line = '\0', parts[i] = line + 1;
        const char *word = parts[0];
        if (strcmp(word, "text") == 0) trace_state(&w, parts[1], parts[2]);
        if (strcmp(word, "number") == 0) trace_state_json(&w, parts[1], "%s", parts[2]);
        if (strcmp(word, "flag") == 0) trace_state_json(&w, parts[1], "%s", parts[2]);
        if (strcmp(word, "list") == 0) trace_state_json(&w, parts[1], "[%s]", parts[2]);
        if (strcmp(word, "tokens") == 0) trace_add_tokens(&w, ids, (size_t)ids_of(parts[1], ids));
        if (strcmp(word, "abort") == 0) abort();
        if (strcmp(word, "end") == 0) trace_end(&w);
        if (strcmp(word, "lines") == 0) lines(&w);
        if (strcmp(word, "add") != 0) continue;
        const int n_dims = numbers(parts[2], shape);
        const int done = strcmp(parts[1], "F32") == 0 ? trace_add(&w, parts[3], (const float *)next, shape, n_dims)
                                                      : trace_add_as(&w, parts[3], parts[1], next, shape, n_dims);
        const int size = parts[1][1] == '6' ? 8 : parts[1][1] == '3' ? 4 : 2;
        if (done == 0) next += trace_product(shape, 0, n_dims) * size;
    }
    if (w.message[0] != '\0') fprintf(stderr, "%s\n", w.message);
    if (w.tokens.text != NULL) trace_end(&w); /* frees what there is */
    return w.message[0] != '\0';
}
