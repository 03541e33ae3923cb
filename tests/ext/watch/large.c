// Ops of pictures, of which --max-node has room for a part: convolutions with strides, paddings and dilations, by columns
// and directly, products, copies, and ops row by row. With an argument values are rounded to F16 a little off.

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/mman.h>

struct params { size_t size; void * memory; bool no_alloc; };
struct traits { void (* from_float)(const float *, uint16_t *, int64_t); };
enum { F32 = 0, F16 = 1 };

void * ggml_init(struct params params);
void * ggml_new_tensor_4d(void * context, int type, int64_t a, int64_t b, int64_t c, int64_t d);
void * ggml_im2col(void *, void *, void *, int, int, int, int, int, int, bool, int);
void * ggml_conv_2d_direct(void *, void *, void *, int, int, int, int, int, int);
void * ggml_conv_2d_dw_direct(void *, void *, void *, int, int, int, int, int, int);
void * ggml_reshape_2d(void *, void *, int64_t, int64_t);
void * ggml_permute(void *, void *, int, int, int, int);
void * ggml_cont(void *, void *);
void * ggml_mul_mat(void *, void *, void *);
void * ggml_add(void *, void *, void *);
void * ggml_silu(void *, void *);
void * ggml_norm(void *, void *, float);
void * ggml_soft_max(void *, void *);
void * ggml_new_graph(void * context);
void ggml_build_forward_expand(void * graph, void * tensor);
void * ggml_get_data(void * tensor);
int64_t ggml_nelements(const void * tensor);
void * ggml_set_name(void * tensor, const char * name);
uint16_t ggml_fp32_to_fp16(float x);
struct traits * ggml_get_type_traits_cpu(int type);
void * ggml_backend_cpu_init(void);
int ggml_backend_graph_compute(void * backend, void * graph);

static void * context, * graph;
static void (* right)(const float *, uint16_t *, int64_t);

static void * made(int type, int64_t a, int64_t b, int64_t c, int64_t d) {
    static uint32_t state = 1;
    void * tensor = ggml_new_tensor_4d(context, type, a, b, c, d);
    for (int64_t i = 0; i < a * b * c * d; i++) {
        state = state * 1664525u + 1013904223u;
        const float value = (float) (state >> 8) / (1 << 24) - 0.4f;
        if (type == F32) {
            ((float *) ggml_get_data(tensor))[i] = value;
        } else {
            ((uint16_t *) ggml_get_data(tensor))[i] = ggml_fp32_to_fp16(value);
        }
    }
    return tensor;
}

static void * put(void * op, const char * name) {
    ggml_set_name(op, name);
    ggml_build_forward_expand(graph, op);
    return op;
}

static void off(const float * x, uint16_t * y, int64_t count) {
    right(x, y, count);
    y[1] ^= 16;
}

int main(int count, char ** words) {
    (void) words;
    context = ggml_init((struct params) { 64 << 20, NULL, false });
    graph = ggml_new_graph(context);
    void * image = made(F32, 64, 48, 8, 1), * small = made(F16, 3, 3, 8, 16);
    void * columns = put(ggml_im2col(context, small, image, 1, 1, 1, 1, 1, 1, true, F16), "columns");
    put(ggml_im2col(context, small, image, 2, 2, 2, 3, 2, 2, true, F32), "far_columns");
    void * rows = ggml_reshape_2d(context, columns, 72, 64 * 48), * matrix = ggml_reshape_2d(context, small, 72, 16);
    void * pixels = put(ggml_mul_mat(context, rows, made(F32, 72, 16, 1, 1)), "pixels");
    put(ggml_mul_mat(context, matrix, put(ggml_cont(context, rows), "rows")), "channels");
    void * seen = put(ggml_conv_2d_direct(context, small, image, 1, 1, 1, 1, 1, 1), "seen");
    put(ggml_conv_2d_direct(context, made(F32, 3, 5, 8, 16), image, 1, 2, 0, 2, 1, 2), "tall");
    put(ggml_conv_2d_dw_direct(context, made(F32, 3, 3, 1, 8), image, 1, 1, 1, 1, 1, 1), "depthwise");
    void * sum = put(ggml_add(context, seen, made(F32, 1, 1, 16, 1)), "sum");
    put(ggml_silu(context, put(ggml_norm(context, sum, 1e-5f), "norm")), "silu");
    void * turned = put(ggml_cont(context, ggml_permute(context, sum, 2, 0, 1, 3)), "turned");
    put(ggml_soft_max(context, put(ggml_add(context, turned, turned), "twice")), "soft_max");
    put(ggml_soft_max(context, pixels), "over_pixels");
    struct traits * traits = ggml_get_type_traits_cpu(F16);
    right = traits->from_float;
    if (count > 1) {
        mprotect((void *) ((uintptr_t) traits & ~(uintptr_t) 4095), 8192, PROT_READ | PROT_WRITE);
        traits->from_float = off;
    }
    printf("%d\n", ggml_backend_graph_compute(ggml_backend_cpu_init(), graph));
    return 0;
}
