// What of llama.h the shim needs, without functions and fields that only newer ones have.
#pragma once
#include "ggml-backend.h"

typedef int32_t llama_token;
struct llama_model;
struct llama_context;
struct llama_model_params {
    ggml_backend_dev_t *devices;
    int32_t n_gpu_layers;
    _Bool vocab_only, use_extra_bufts;
};
struct llama_context_params {
    uint32_t n_ctx, n_batch, n_ubatch, n_seq_max;
    int32_t n_threads, n_threads_batch;
    float rope_freq_base, rope_freq_scale;
    ggml_backend_sched_eval_callback cb_eval;
    enum ggml_type type_k, type_v;
    _Bool embeddings, flash_attn;
};
struct llama_batch {
    int32_t n_tokens, *token, *pos, *n_seq_id, **seq_id;
    int8_t *logits;
};

struct llama_model_params llama_model_default_params(void);
struct llama_context_params llama_context_default_params(void);
struct llama_model *llama_model_load_from_file(const char *, struct llama_model_params);
struct llama_context *llama_init_from_model(struct llama_model *, struct llama_context_params);
struct llama_batch llama_batch_init(int32_t, int32_t, int32_t);
int32_t llama_decode(struct llama_context *, struct llama_batch);
void llama_batch_free(struct llama_batch);

int32_t llama_tokenize(
    const struct llama_model *, const char *, int32_t, int32_t *, int32_t, _Bool, _Bool);
int32_t llama_n_layer(const struct llama_model *);
int32_t llama_n_ctx_train(const struct llama_model *);
void llama_free_model(struct llama_model *);
const struct llama_model *llama_get_model(const struct llama_context *);
int32_t llama_model_meta_val_str(const struct llama_model *, const char *, char *, size_t);
void llama_kv_cache_clear(struct llama_context *);
_Bool llama_kv_cache_seq_rm(struct llama_context *, int32_t, int32_t, int32_t);
void llama_kv_cache_seq_cp(struct llama_context *, int32_t, int32_t, int32_t, int32_t);
void llama_kv_cache_seq_add(struct llama_context *, int32_t, int32_t, int32_t, int32_t);
