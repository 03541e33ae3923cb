/* driver OUT TOKENS VALUES LAST [NAME:2x3]...: writes taps with values from a file of f32; LAST: end or abort. */
#include "trace_writer.c"

static float values[1 << 16];

static int failed(const trace_writer *w)
{
    fprintf(stderr, "%s\n", w->message);
    return 1;
}

/* The whole numbers of a text such as 2x3 or 1,17,5. */
static int numbers(char *text, int64_t *into)
{
    int n = 0;
    for (char *word = strtok(text, "x,"); word != NULL; word = strtok(NULL, "x,")) into[n++] = strtoll(word, NULL, 10);
    return n;
}

int main(int argc, char **argv)
{
    int64_t ids[64], shape[16];
    int32_t tokens[64];
    const int n_tokens = numbers(argv[2], ids);
    for (int i = 0; i < n_tokens; i++) tokens[i] = (int32_t)ids[i];
    FILE *file = fopen(argv[3], "rb");
    if (file == NULL || fread(values, 4, 1 << 16, file) == 0) return 2;
    fclose(file);

    trace_writer w;
    if (trace_begin(&w, argv[1], tokens, (size_t)n_tokens) != 0) return failed(&w);
    const float *next = values;
    for (int i = 5; i < argc; i++) {
        char *colon = strrchr(argv[i], ':');
        *colon = '\0';
        const int n_dims = numbers(colon + 1, shape);
        if (trace_add(&w, argv[i], next, shape, n_dims) != 0) break; /* the error sticks: the end reports it */
        int64_t count = 1;
        for (int dim = 0; dim < n_dims; dim++) count *= shape[dim];
        next += count;
    }
    if (strcmp(argv[4], "abort") == 0) abort();
    return trace_end(&w) != 0 ? failed(&w) : 0;
}
