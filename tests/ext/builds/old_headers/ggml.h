// What of ggml.h the shim needs.
#pragma once
#include <stddef.h>
#include <stdint.h>

enum ggml_type { GGML_TYPE_F32 };
enum ggml_op { GGML_OP_NONE };

struct ggml_tensor {
    enum ggml_type type;
    struct ggml_backend_buffer *buffer;
    int64_t ne[4];
    size_t nb[4];
    enum ggml_op op;
    int32_t op_params[16];
    int32_t flags;
    struct ggml_tensor *src[10], *view_src;
    size_t view_offs;
    void *data;
    char name[64];
};
