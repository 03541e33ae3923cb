// What of ggml-backend.h the shim needs.
#pragma once
#include "ggml.h"

typedef struct ggml_backend_device *ggml_backend_dev_t;
typedef _Bool (*ggml_backend_sched_eval_callback)(struct ggml_tensor *, _Bool, void *);
