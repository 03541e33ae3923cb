// Kernels of ggml's for the CPU, each with a mistake that sleeps where WRONG_KERNEL does not name it: loaded before
// ggml's own, in the process that stands for one device. That one has a single thread.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdlib.h>
#include <string.h>

#include "ggml.h"

struct ggml_compute_params;
typedef void kernel(const struct ggml_compute_params *, struct ggml_tensor *);

static int is_ggml_cpu(struct dl_phdr_info * info, size_t size, void * path) {
    (void) size;
    *(const char **) path = info->dlpi_name;
    return strstr(info->dlpi_name, "libggml-cpu") != NULL;
}

static void run(const char * name, const struct ggml_compute_params * params, struct ggml_tensor * out) {
    const char * path = NULL;
    dl_iterate_phdr(is_ggml_cpu, &path);
    kernel * right;
    *(void **) &right = dlsym(dlopen(path, RTLD_LAZY | RTLD_NOLOAD), name);
    right(params, out);
    const char * mistake = getenv("WRONG_KERNEL");
    if (mistake != NULL && strcmp(mistake, name + strlen("ggml_compute_forward_")) == 0 && out->type == GGML_TYPE_F32) {
        const long count = ggml_nelements(out);
        ((float *) out->data)[count - 1] = 1.01f * ((float *) out->data)[count - 1] + 0.01f;  // its last value
    }
}

#define KERNEL(name)                                                                  \
    void name(const struct ggml_compute_params * params, struct ggml_tensor * out) {  \
        run(#name, params, out);                                                      \
    }

KERNEL(ggml_compute_forward_mul_mat)
KERNEL(ggml_compute_forward_rms_norm)
KERNEL(ggml_compute_forward_rope)
KERNEL(ggml_compute_forward_soft_max)
KERNEL(ggml_compute_forward_glu)
KERNEL(ggml_compute_forward_add)
