// What llamadiff asks of llama.cpp where structures are involved, compiled against the headers of the llama.cpp at hand.
//
// Functions and structures here are an interface of llamadiff's own, which stays the same: numbers and pointers alone.
// HAS_x is defined where the headers have the word x: a field or a function that not every version has. What one has not
// is left out. Functions of later versions are made of those of earlier ones, at the end.

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

// ---- parameters: do they lie in these headers where llama.cpp fills them in? ----------------------------------------

SHIM const struct shim_field shim_sizes[] = {
    { "llama_model_default_params", sizeof(struct llama_model_params) },
    { "llama_context_default_params", sizeof(struct llama_context_params) }, { "", 0 },
};

// A field that does not hold what every release puts there by itself, or NULL.
SHIM const char * shim_misplaced(void) {
    const struct llama_context_params params = llama_context_default_params();
    const int f16 = 1;  // as files have it
#ifdef HAS_n_seq_max
    if (params.n_seq_max != 1) {
        return "n_seq_max";
    }
#endif
    if (params.rope_freq_base != 0.0f || params.rope_freq_scale != 0.0f) {
        return "rope_freq_base";
    }
    if (params.cb_eval != NULL) {
        return "cb_eval";
    }
    if ((int) params.type_k != f16 || (int) params.type_v != f16) {
        return "type_k";
    }
    return params.embeddings ? "embeddings" : NULL;
}

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

// devices: those that share the layers, and NULL behind the last; parts: NULL, or as many numbers as any version reads.
SHIM void * shim_model(
    const char * path, int32_t gpu_layers, int32_t repack, int32_t vocab_only, void ** devices, int32_t split,
    const float * parts
) {
    (void) repack;  // not every version has what they are for
    struct llama_model_params params = llama_model_default_params();
    params.n_gpu_layers = gpu_layers;
    params.vocab_only = vocab_only != 0;
#ifdef HAS_use_extra_bufts
    params.use_extra_bufts = repack != 0;
#endif
#ifdef HAS_repack_tensors
    params.repack_tensors = repack != 0;
#endif
#ifdef HAS_ggml_backend_dev_t
    if (devices[0] != NULL || gpu_layers == 0) {  // no list would be all GPUs, whatever has layers there
        params.devices = (ggml_backend_dev_t *) devices;  // llama.cpp reads it while it loads, and keeps no pointer to it
    }
#endif
    if (devices[0] != NULL) {
        params.split_mode = (enum llama_split_mode) split;
        params.tensor_split = parts;
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
#ifdef HAS_n_seq_max
    params.n_seq_max = (uint32_t) room->n_seq;
#endif
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
#elif defined(HAS_flash_attn)
    params.flash_attn = room->flash_attn != 0;
#endif
#ifdef HAS_fused_up_gate  // ik_llama.cpp: each op by itself
    params.fused_moe_up_gate = params.fused_up_gate = params.fused_mmad = params.rope_cache = params.graph_reuse = false;
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
    void * context, int32_t n, const int32_t * tokens, const int32_t * positions, const int32_t * sequences,
    const int32_t * logits
) {
    struct llama_batch batch = llama_batch_init(n, 0, 1);
    batch.n_tokens = n;
    for (int32_t i = 0; i < n; i++) {
        batch.token[i] = tokens[i];
        batch.pos[i] = positions[i];
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = sequences[i];
        batch.logits[i] = (int8_t) logits[i];
    }
    const int32_t code = llama_decode((struct llama_context *) context, batch);
    llama_batch_free(batch);
    return code;
}

// ---- how a CPU rounds, where the structure that says so is given by value -------------------------------------------

#ifdef HAS_ggml_internal_get_type_traits
SHIM void * shim_from_float(int32_t type) {
    return (void *) ggml_internal_get_type_traits((enum ggml_type) type).from_float;
}

SHIM int32_t shim_partner(int32_t type) {
    return (int32_t) ggml_internal_get_type_traits((enum ggml_type) type).vec_dot_type;
}
#endif

// ---- functions of later versions, made of those that there are ------------------------------------------------------

SHIM int32_t shim_tokenizes_by_model(void) {  // and not by the model's vocabulary
    typedef int32_t by_model(
        const struct llama_model *, const char *, int32_t, llama_token *, int32_t, bool, bool);
    return __builtin_types_compatible_p(__typeof__(llama_tokenize), by_model);
}

#ifndef HAS_llama_model_n_layer
SHIM int32_t llama_model_n_layer(const struct llama_model * model) { return llama_n_layer(model); }
#endif

#ifndef HAS_llama_model_n_ctx_train
SHIM int32_t llama_model_n_ctx_train(const struct llama_model * model) { return llama_n_ctx_train(model); }
#endif

#ifndef HAS_llama_model_free
SHIM void llama_model_free(struct llama_model * model) { llama_free_model(model); }
#endif

#ifndef HAS_llama_get_memory  // the memory of a context is the context; of a model that attends both ways there is none
#include <stdio.h>
#include <string.h>

SHIM void * llama_get_memory(struct llama_context * context) {
    const struct llama_model * model = llama_get_model(context);
    char architecture[64], key[96], causal[16];
    if (llama_model_meta_val_str(model, "general.architecture", architecture, sizeof(architecture)) > 0) {
        snprintf(key, sizeof(key), "%s.attention.causal", architecture);
        if (llama_model_meta_val_str(model, key, causal, sizeof(causal)) > 0 && strcmp(causal, "false") == 0) {
            return NULL;
        }
    }
    return context;
}

SHIM void llama_memory_clear(void * memory, bool data) {
    (void) data;
    llama_kv_cache_clear(memory);
}

SHIM bool llama_memory_seq_rm(void * memory, int32_t sequence, int32_t start, int32_t stop) {
    return llama_kv_cache_seq_rm(memory, sequence, start, stop);
}

SHIM void llama_memory_seq_cp(void * memory, int32_t source, int32_t target, int32_t start, int32_t stop) {
    llama_kv_cache_seq_cp(memory, source, target, start, stop);
}

SHIM void llama_memory_seq_add(void * memory, int32_t sequence, int32_t start, int32_t stop, int32_t by) {
    llama_kv_cache_seq_add(memory, sequence, start, stop, by);
}

SHIM bool llama_memory_can_shift(void * memory) {  // nothing says so
    (void) memory;
    return false;
}
#endif

#ifndef HAS_ggml_backend_dev_t  // what there is are backends, by numbers; a device is one and more
#define NUMBER(device) ((size_t) (uintptr_t) (device) - 1)

SHIM size_t ggml_backend_dev_count(void) { return ggml_backend_reg_get_count(); }

SHIM void * ggml_backend_dev_get(size_t number) { return (void *) (uintptr_t) (number + 1); }

SHIM const char * ggml_backend_dev_name(void * device) { return ggml_backend_reg_get_name(NUMBER(device)); }

SHIM const char * ggml_backend_dev_description(void * device) { return ggml_backend_dev_name(device); }

SHIM void * ggml_backend_dev_buffer_type(void * device) {
    return ggml_backend_reg_get_default_buffer_type(NUMBER(device));
}

SHIM int32_t ggml_backend_dev_type(void * device) {  // a GPU's memory is its own
    return ggml_backend_buft_is_host(ggml_backend_dev_buffer_type(device)) ? 0 : 1;
}

SHIM void * ggml_backend_dev_backend_reg(void * device) { return device; }

SHIM void * ggml_backend_reg_get_proc_address(void * backend, const char * name) {
    (void) backend;
    (void) name;
    return NULL;
}

SHIM void * ggml_backend_dev_init(void * device, const char * parameters) {
    return ggml_backend_reg_init_backend(NUMBER(device), parameters);
}

SHIM bool ggml_backend_dev_supports_op(void * device, const struct ggml_tensor * op) {
    ggml_backend_t backend = ggml_backend_dev_init(device, NULL);
    const bool does = backend != NULL && ggml_backend_supports_op(backend, op);
    ggml_backend_free(backend);
    return does;
}
#endif
