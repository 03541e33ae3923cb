"""One measurement, as its own process: llama.cpp's decode of a prompt. ``decode_once.py MODEL 1,2,3`` prints JSON.

The settings are those of the worker that records the baseline, without its callback. Only ``llama_decode`` of the
whole prompt is timed: the first one of the process, as everybody has it, and another, with everything warm.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from typing import Any

from llama_cpp import llama_cpp

F32 = 0  # ggml_type


def load(path: str) -> Any:
    """The model, its weights as they are in the file."""
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    params.use_extra_bufts = False
    model = llama_cpp.llama_model_load_from_file(path.encode(), params)
    if not model:
        sys.exit(f"{path}: llama.cpp cannot load the model")
    return model


def context_for(model: Any, n_tokens: int) -> Any:
    """A context with every thread, a float32 cache and no flash attention."""
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = max(256, n_tokens)
    params.n_batch = params.n_ubatch = max(32, n_tokens)
    params.type_k = params.type_v = F32
    params.flash_attn_type = 0
    params.n_threads = params.n_threads_batch = os.cpu_count() or 1
    return llama_cpp.llama_init_from_model(model, params)


def decode(context: Any, tokens: list[int]) -> tuple[float, float]:
    """Seconds of one decode of all tokens, logits for each, from an empty cache: by the clock, and of CPU time."""
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
        batch.seq_id[i][0] = 0
    started, cpu = time.perf_counter(), time.process_time()
    code = llama_cpp.llama_decode(context, batch)
    seconds = time.perf_counter() - started, time.process_time() - cpu
    llama_cpp.llama_batch_free(batch)
    if code != 0:
        sys.exit(f"llama_decode failed with code {code}")
    return seconds


def main() -> None:
    """Load, warm, measure."""
    path, tokens = sys.argv[1], [int(token) for token in sys.argv[2].split(",")]
    llama_cpp.llama_backend_init()
    started = time.perf_counter()
    model = load(path)
    context = context_for(model, len(tokens))
    loaded = time.perf_counter() - started
    (first, cpu), (again, _) = decode(context, tokens), decode(context, tokens)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"load_s": loaded, "decode_s": first, "decode_cpu_s": cpu, "again_s": again, "peak": peak}))


if __name__ == "__main__":
    main()
