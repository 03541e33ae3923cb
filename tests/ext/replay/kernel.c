/* An RMS norm that reads an op's file without a library: the header's length, the header, the values. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char *after(char *text, const char *words) {
    char *found = strstr(text, words);
    if (!found) { fprintf(stderr, "no %s\n", words); exit(1); }
    return found + strlen(words);
}

int main(int argc, char **argv) {
    if (argc != 3) return 1;
    FILE *op = fopen(argv[1], "rb");
    uint64_t length;
    if (!op || fread(&length, 8, 1, op) != 1 || length > 1 << 20) return 1;
    char *header = calloc(1, length + 1);
    if (fread(header, 1, length, op) != length) return 1;
    float eps = strtof(after(header, "\"parameter.eps\":\""), NULL);
    char *source = after(header, "\"source.0\":{");
    unsigned long n[4], first, last;
    sscanf(after(source, "\"shape\":["), "%lu,%lu,%lu,%lu", n, n + 1, n + 2, n + 3);
    sscanf(after(source, "\"data_offsets\":["), "%lu,%lu", &first, &last);
    float *x = malloc(last - first);
    fseek(op, 8 + (long)length + (long)first, SEEK_SET);
    if (fread(x, 1, last - first, op) != last - first) return 1;
    for (float *row = x; row < x + n[0] * n[1] * n[2] * n[3]; row += n[3]) {
        float sum = 0;
        for (unsigned long i = 0; i < n[3]; i++) sum += row[i] * row[i];
        float scale = 1 / sqrtf(sum / (float)n[3] + eps);
        for (unsigned long i = 0; i < n[3]; i++) row[i] *= scale;
    }
    FILE *out = fopen(argv[2], "wb");
    return out && fwrite(x, 1, last - first, out) == last - first && !fclose(out) ? 0 : 1;
}
