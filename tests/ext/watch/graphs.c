// Graphs without a scheduler: by a backend, by one that is waited for later, with a plan. Prints whether all gave the same.

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct params { size_t size; void * memory; bool no_alloc; };
struct cplan { size_t work_size; void * work; char rest[64]; };

void * ggml_init(struct params params);
void * ggml_new_tensor_2d(void * context, int type, int64_t a, int64_t b);
void * ggml_mul_mat(void * context, void * a, void * b);
void * ggml_soft_max(void * context, void * a);
void * ggml_new_graph(void * context);
void ggml_build_forward_expand(void * graph, void * tensor);
void * ggml_get_data(void * tensor);
void * ggml_set_name(void * tensor, const char * name);
int ggml_backend_graph_compute(void * backend, void * graph);
int ggml_backend_graph_compute_async(void * backend, void * graph);
void ggml_backend_synchronize(void * backend);
void * ggml_backend_cpu_init(void);
struct cplan ggml_graph_plan(void * graph, int threads, void * pool);
int ggml_graph_compute(void * graph, struct cplan * plan);

static void * made(void * context, int rows) {
    void * tensor = ggml_new_tensor_2d(context, 0, 64, rows);
    float * data = ggml_get_data(tensor);
    for (int i = 0; i < 64 * rows; i++) {
        data[i] = (float) (7 * i % 13 - 6) / 13;
    }
    return tensor;
}

int main(void) {
    void * context = ggml_init((struct params) { 1 << 24, NULL, false });
    void * x = made(context, 5);
    ggml_set_name(x, "inp_raw");
    void * y = ggml_soft_max(context, ggml_mul_mat(context, made(context, 32), x));
    ggml_set_name(y, "probabilities");
    void * graph = ggml_new_graph(context);
    ggml_build_forward_expand(graph, y);
    void * backend = ggml_backend_cpu_init();
    float first[32 * 5];
    int same = ggml_backend_graph_compute(backend, graph) == 0;
    memcpy(first, ggml_get_data(y), sizeof(first));
    memset(ggml_get_data(y), 0, sizeof(first));
    same &= ggml_backend_graph_compute_async(backend, graph) == 0;
    ggml_backend_synchronize(backend);
    same &= memcmp(first, ggml_get_data(y), sizeof(first)) == 0;
    memset(ggml_get_data(y), 0, sizeof(first));
    struct cplan plan = ggml_graph_plan(graph, 1, NULL);
    plan.work = malloc(plan.work_size + 64);
    same &= ggml_graph_compute(graph, &plan) == 0;
    same &= memcmp(first, ggml_get_data(y), sizeof(first)) == 0;
    printf("%s %.9g\n", same ? "same" : "other", first[0]);
    return 0;
}
