// What llamadiff asks of llama.cpp where structures are involved, compiled against the headers of the llama.cpp at hand.
//
// Functions and structures here are an interface of llamadiff's own, which stays the same: numbers and pointers alone.
// HAS_x is defined where the headers have the word x: a field or a function that not every version has.

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ggml-backend.h"
#include "ggml.h"
#include "llama.h"

#ifdef _WIN32
#define SHIM __declspec(dllexport)
#else
#define SHIM
#endif

// ---- tensors: where the fields are that llamadiff reads ------------------------------------------------------------

struct shim_field {
    const char * name;
    uint64_t offset;
};

#define FIELD(field) { #field, offsetof(struct ggml_tensor, field) }

SHIM const struct shim_field shim_fields[] = {
    FIELD(type), FIELD(buffer), FIELD(ne), FIELD(nb), FIELD(op), FIELD(op_params), FIELD(flags), FIELD(src),
    FIELD(view_src), FIELD(view_offs), FIELD(data), FIELD(name), { "", sizeof(struct ggml_tensor) },
};

// ---- backends: those that are libraries of their own are loaded from the folder -------------------------------------

SHIM void shim_load_backends(const char * folder) {
#ifdef HAS_ggml_backend_load_all_from_path
    if (ggml_backend_dev_count() == 0) {
        ggml_backend_load_all_from_path(folder);
    }
#else
    (void) folder;
#endif
}

// ---- models ---------------------------------------------------------------------------------------------------------

SHIM void * shim_model(const char * path, int32_t gpu_layers, int32_t repack, int32_t vocab_only, void * device) {
    static ggml_backend_dev_t devices[2];  // llama.cpp reads it while it loads, and keeps no pointer to it
    struct llama_model_params params = llama_model_default_params();
    params.n_gpu_layers = gpu_layers;
    params.use_extra_bufts = repack != 0;
    params.vocab_only = vocab_only != 0;
    if (device != NULL || gpu_layers == 0) {  // no list would be all GPUs, whatever has layers there
        devices[0] = (ggml_backend_dev_t) device;
        params.devices = devices;
    }
    return llama_model_load_from_file(path, params);
}

// ---- contexts -------------------------------------------------------------------------------------------------------

struct shim_room {
    int32_t n_ctx, n_batch, n_ubatch, n_seq, type_k, type_v, flash_attn, threads, offload, pooled;
    float rope_base, rope_scale;  // 0: the file's
};

SHIM void * shim_context(void * model, const struct shim_room * room, ggml_backend_sched_eval_callback observe) {
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = (uint32_t) room->n_ctx;
    params.n_batch = (uint32_t) room->n_batch;
    params.n_ubatch = (uint32_t) room->n_ubatch;
    params.n_seq_max = (uint32_t) room->n_seq;
    params.type_k = (enum ggml_type) room->type_k;
    params.type_v = (enum ggml_type) room->type_v;
    params.n_threads = room->threads;
    params.n_threads_batch = room->threads;
    params.cb_eval = observe;
    params.embeddings = room->pooled != 0;
    params.rope_freq_base = room->rope_base;
    params.rope_freq_scale = room->rope_scale;
#ifdef HAS_flash_attn_type
    params.flash_attn_type = room->flash_attn ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
#else
    params.flash_attn = room->flash_attn != 0;
#endif
#ifdef HAS_kv_unified
    params.kv_unified = room->n_seq > 1 || params.kv_unified;
#endif
#ifdef HAS_op_offload
    params.op_offload = room->offload != 0;  // else large batches are computed on a GPU that nobody asked for
#endif
    return llama_init_from_model((struct llama_model *) model, params);
}

// ---- batches: every token with its position and its sequence, all with logits ---------------------------------------

SHIM int32_t shim_decode(
    void * context, int32_t n, const int32_t * tokens, const int32_t * positions, const int32_t * sequences
) {
    struct llama_batch batch = llama_batch_init(n, 0, 1);
    batch.n_tokens = n;
    for (int32_t i = 0; i < n; i++) {
        batch.token[i] = tokens[i];
        batch.pos[i] = positions[i];
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = sequences[i];
        batch.logits[i] = 1;
    }
    const int32_t code = llama_decode((struct llama_context *) context, batch);
    llama_batch_free(batch);
    return code;
}
