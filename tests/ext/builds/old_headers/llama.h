// What of llama.h the shim needs, without the words that only newer ones have: HAS_x is defined for none.
#pragma once
#include "ggml-backend.h"

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
