// One op after the other, as vision, speech and images need them, by ggml's CPU backend: what watched_bugs.py watches.

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

static struct ggml_context * context;
static struct ggml_cgraph * graph;

static struct ggml_tensor * made(enum ggml_type type, int64_t a, int64_t b, int64_t c, int64_t d) {
    static uint32_t state = 1;
    struct ggml_tensor * tensor = ggml_new_tensor_4d(context, type, a, b, c, d);
    for (int64_t i = 0; i < a * b * c * d; i++) {
        state = state * 1664525u + 1013904223u;
        const float value = (float) (state >> 8) / (1 << 24) - 0.4f;
        if (type == GGML_TYPE_F32) {
            ((float *) tensor->data)[i] = value;
        } else {
            ((ggml_fp16_t *) tensor->data)[i] = ggml_fp32_to_fp16(value);
        }
    }
    return tensor;
}

static void put(struct ggml_tensor * op, const char * name) {
    ggml_set_name(op, name);
    ggml_build_forward_expand(graph, op);
}

int main(void) {
    context = ggml_init((struct ggml_init_params) { 64 << 20, NULL, false });
    graph = ggml_new_graph(context);
    const enum ggml_type f32 = GGML_TYPE_F32, f16 = GGML_TYPE_F16;
    struct ggml_tensor * image = made(f32, 12, 10, 4, 1);
    put(ggml_im2col(context, made(f32, 3, 3, 4, 5), image, 2, 1, 1, 1, 1, 1, true, f32), "patches");
    put(ggml_conv_2d_direct(context, made(f32, 3, 3, 4, 5), image, 1, 2, 1, 1, 1, 1), "conv");
    put(ggml_conv_2d_dw_direct(context, made(f32, 3, 3, 1, 4), image, 1, 1, 1, 1, 1, 1), "depthwise");
    put(ggml_conv_transpose_1d(context, made(f32, 4, 3, 6, 1), made(f32, 9, 6, 1, 1), 2, 0, 1), "transposed_1d");
    put(ggml_conv_transpose_2d_p0(context, made(f16, 2, 2, 3, 4), image, 2), "transposed_2d");
    put(ggml_pool_2d(context, image, GGML_OP_POOL_AVG, 2, 2, 2, 2, 0, 0), "pooled");
    put(ggml_pool_1d(context, image, GGML_OP_POOL_MAX, 3, 3, 0), "pooled_1d");
    put(ggml_group_norm(context, image, 2, 1e-6f), "group_norm");
    put(ggml_pad(context, image, 1, 2, 0, 0), "padded");
    put(ggml_pad_reflect_1d(context, made(f32, 16, 5, 1, 1), 3, 2), "reflected");
    put(ggml_arange(context, 0.5f, 20.0f, 0.75f), "range");
    put(ggml_timestep_embedding(context, made(f32, 3, 1, 1, 1), 32, 10000), "timesteps");
    put(ggml_upscale(context, image, 2, GGML_SCALE_MODE_NEAREST), "upscaled");
    put(ggml_roll(context, image, 2, 3, 0, 0), "rolled");
    put(ggml_cumsum(context, image), "sums");
    put(ggml_win_part(context, made(f32, 4, 10, 12, 1), 7), "windows");
    put(ggml_get_rel_pos(context, made(f16, 8, 11, 1, 1), 6, 6), "positions");
    put(ggml_leaky_relu(context, image, 0.1f, false), "leaky");
    put(ggml_norm(context, image, 1e-5f), "norm");
    put(ggml_rms_norm(context, image, 1e-5f), "rms_norm");
    ggml_backend_t backend = ggml_backend_cpu_init();
    return (int) ggml_backend_graph_compute(backend, graph);
}
