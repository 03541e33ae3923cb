// A kernel of ggml's that computes RMS_NORM and MUL as one, with a mistake: loaded before ggml's own.
// It lies in llama.cpp's process alone, and sleeps where nobody says by WRONG_KERNEL which mistake is meant.

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "ggml.h"

#define NAME "ggml_compute_forward_rms_norm_mul_fused"

struct ggml_compute_params;
typedef void kernel(const struct ggml_compute_params *, struct ggml_tensor *, struct ggml_tensor *);

void ggml_compute_forward_rms_norm_mul_fused(
        const struct ggml_compute_params * params, struct ggml_tensor * norm, struct ggml_tensor * mul) {
    kernel * right;
    void * ggml = dlopen("libggml-cpu.so.0", RTLD_LAZY | RTLD_NOLOAD);
    *(void **) &right = dlsym(ggml != NULL ? ggml : RTLD_NEXT, NAME);
    right(params, norm, mul);

    const char * mistake = getenv("WRONG_KERNEL");
    const int thread = *(const int *) params;
    if (mistake == NULL || thread != 0) {
        return;
    }
    float * rows = (float *) mul->data;
    const long width = mul->ne[0], count = mul->ne[1] * mul->ne[2] * mul->ne[3];
    float * last = rows + (count - 1) * width;
    if (strcmp(mistake, "value") == 0) {  // the last value of the last row, by a thousandth
        last[width - 1] *= 1.001f;
    } else if (strcmp(mistake, "row") == 0) {  // the last row is the first one's
        memmove(last, rows, width * sizeof(float));
    } else if (strcmp(mistake, "eps") == 0) {  // as if eps were a tenth of the mean square
        for (long i = 0; i < width * count; i++) {
            rows[i] *= 0.953f;
        }
    } else if (strcmp(mistake, "weight") == 0) {  // a weight further on
        const float * w = (const float *) mul->src[1]->data;
        for (long i = 0; i < width * count; i++) {
            rows[i] *= w[(i + 1) % width] / w[i % width];
        }
    }
}
