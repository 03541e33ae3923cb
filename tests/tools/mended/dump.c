// Writes what nodes of llama.cpp's graphs give into the folder DUMP, one file each: "GRAPH NAME COLUMNS ROWS.f32".
// It stands before the library LIB by LD_PRELOAD, and gives each graph an eval callback.

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ggml-backend.h"
#include "ggml.h"

static int graph;

static void * of_library(const char * name) {
    return dlsym(dlopen(getenv("LIB"), RTLD_LAZY | RTLD_NOLOAD), name);
}

static bool write_node(struct ggml_tensor * node, bool is_asked, void * unused) {
    (void) unused;
    const size_t step = node->ne[0] * sizeof(float);
    const bool is_wanted = node->type == GGML_TYPE_F32 && node->nb[0] == sizeof(float) && node->nb[1] == step
        && (!strncmp(node->name, "mtp_", 4) || !strncmp(node->name, "h_", 2)) && !strchr(node->name, '(');
    if (is_asked || !is_wanted) {
        return is_asked ? is_wanted : true;
    }
    char path[600];
    const long columns = node->ne[0], rows = node->ne[1] * node->ne[2] * node->ne[3];
    snprintf(path, sizeof(path), "%s/%03d %s %ld %ld.f32", getenv("DUMP"), graph, node->name, columns, rows);
    float * values = malloc(columns * rows * sizeof(float));
    __typeof__(ggml_backend_tensor_get) * get = of_library("ggml_backend_tensor_get");
    get(node, values, 0, columns * rows * sizeof(float));
    FILE * file = fopen(path, "wb");
    fwrite(values, sizeof(float), columns * rows, file);
    fclose(file);
    free(values);
    return true;
}

enum ggml_status ggml_backend_sched_graph_compute_async(ggml_backend_sched_t sched, struct ggml_cgraph * cgraph) {
    __typeof__(ggml_backend_sched_set_eval_callback) * set = of_library("ggml_backend_sched_set_eval_callback");
    __typeof__(ggml_backend_sched_graph_compute_async) * compute = of_library("ggml_backend_sched_graph_compute_async");
    graph++;
    set(sched, write_node, NULL);
    return compute(sched, cgraph);
}
