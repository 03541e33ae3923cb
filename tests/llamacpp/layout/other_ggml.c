/* A ggml whose tensors are laid out otherwise: other order, other sizes. LACKS_STRIDES: one that keeps no strides.
   Memory that it has to ask for itself was used before: behind the second tensor somebody left a 1. */
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

struct init { size_t mem_size; void *mem_buffer; bool no_alloc; };
struct tensor {
    char name[96];
    struct tensor *view_src;
    int64_t ne[4];
    void *data;
    int32_t op_params[24];
    int op;
    int type;
#ifndef LACKS_STRIDES
    size_t nb[4];
#endif
    size_t view_offs;
    struct tensor *src[12];
    int32_t flags;
    void *buffer;
};
enum { BEHIND = 32 };  /* bytes */
struct context { bool no_alloc, given; int count; struct tensor *made[16]; };
static char cpu, held;
static const char *NAMES[64] = { "NONE", "REPEAT", "VIEW", "ADD", "MUL", "SCALE" };
enum { NONE, REPEAT, VIEW, ADD, MUL, SCALE };

void *ggml_init(struct init params)
{
    struct context *context = calloc(1, sizeof *context);
    context->no_alloc = params.no_alloc;
    context->given = params.mem_buffer != NULL;
    return context;
}

void ggml_free(struct context *context)
{
    for (int i = 0; i < context->count; i++) {
        if (!context->made[i]->view_src && context->made[i]->data)
            free(context->made[i]->data);
        free(context->made[i]);
    }
    free(context);
}

size_t ggml_tensor_overhead(void) { return sizeof(struct tensor) + BEHIND; }

struct tensor *ggml_new_tensor_4d(struct context *context, int type, int64_t a, int64_t b, int64_t c, int64_t d)
{
    struct tensor *t = calloc(1, sizeof *t + BEHIND);
    if (!context->given && context->count == 1)
        *(int32_t *)(t + 1) = 1;
    size_t size = type == 1 ? 2 : 4;
    memcpy(t->ne, (int64_t[]){ a, b, c, d }, sizeof t->ne);
#ifndef LACKS_STRIDES
    memcpy(t->nb, (size_t[]){ size, size * a, size * a * b, size * a * b * c }, sizeof t->nb);
#endif
    t->type = type;
    t->data = context->no_alloc ? NULL : malloc(size * a * b * c * d);
    context->made[context->count++] = t;
    return t;
}

static struct tensor *result(struct context *context, int op, struct tensor *a)
{
    struct tensor *t = ggml_new_tensor_4d(context, a->type, a->ne[0], a->ne[1], a->ne[2], a->ne[3]);
    t->op = op;
    t->src[0] = a;
    return t;
}

struct tensor *ggml_add(struct context *context, struct tensor *a, struct tensor *b)
{
    struct tensor *t = result(context, ADD, a);
    t->src[1] = b;
    return t;
}

struct tensor *ggml_scale(struct context *context, struct tensor *a, float s)
{
    struct tensor *t = result(context, SCALE, a);
    memcpy(t->op_params, &s, sizeof s);
    return t;
}

struct tensor *ggml_view_1d(struct context *context, struct tensor *a, int64_t n, size_t offset)
{
    struct tensor *t = result(context, VIEW, a);
    free(t->data);
    memcpy(t->ne, (int64_t[]){ n, 1, 1, 1 }, sizeof t->ne);
    t->view_src = a;
    t->view_offs = offset;
    t->data = (char *)a->data + offset;
    return t;
}

struct tensor *ggml_set_name(struct tensor *t, const char *name)
{
    strncpy(t->name, name, sizeof t->name - 1);
    return t;
}

void ggml_set_input(struct tensor *t) { t->flags |= 1; }
const char *ggml_get_name(struct tensor *t) { return t->name; }
void *ggml_get_data(struct tensor *t) { return t->data; }
const char *ggml_op_name(int op) { return NAMES[op] ? NAMES[op] : ""; }
void *ggml_backend_cpu_buffer_type(void) { return &cpu; }

void *ggml_backend_alloc_ctx_tensors_from_buft(struct context *context, void *type)
{
    for (int i = 0; i < context->count; i++) {
        context->made[i]->buffer = &held;
        context->made[i]->data = malloc(8192);
    }
    return type == &cpu ? &held : NULL;
}

void ggml_backend_buffer_free(void *buffer) { (void)buffer; }
