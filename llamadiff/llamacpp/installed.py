"""llama.cpp as llama-cpp-python brings it; its ctypes structures are asked for what they have."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp

from llamadiff.llamacpp.interface import Handle, Library, Loading, Observe, Room
from llamadiff.llamacpp.layout import tensor_structure
from llamadiff.llamacpp.library import behind, load, set_fields
from llamadiff.system.libraries import Loaded


class Installed(Library):
    """The llama.cpp of the llama-cpp-python that is installed."""

    def __init__(self) -> None:
        llama = Path(llama_cpp._lib._name)
        super().__init__(Loaded(llama, behind(llama)), f"llama-cpp-python {version('llama-cpp-python')}")

    def structure(self) -> type[ctypes.Structure]:
        return tensor_structure(load("ggml-base"))

    def load(self, path: bytes, loading: Loading) -> Handle:
        params = llama_cpp.llama_model_default_params()
        set_fields(params, n_gpu_layers=loading.layers, use_extra_bufts=loading.repack, vocab_only=loading.vocab_only)
        if loading.device is not None or not loading.layers:  # no list would be all GPUs, whatever has layers there
            self.chosen = (ctypes.c_void_p * 2)(loading.device, None)  # kept while the model is loaded
            set_fields(params, devices=ctypes.cast(self.chosen, ctypes.c_void_p))
        return llama_cpp.llama_model_load_from_file(path, params)

    def context(self, model: Handle, room: Room, observe: Observe | None) -> Handle:
        params = llama_cpp.llama_context_default_params()
        set_fields(
            params, n_ctx=room.n_ctx, n_batch=room.n_batch, n_ubatch=room.n_ubatch, n_seq_max=room.n_seq,
            type_k=room.type_k, type_v=room.type_v, n_threads=room.threads, n_threads_batch=room.threads,
            embeddings=room.pooled, rope_freq_base=room.rope_base, rope_freq_scale=room.rope_scale,
            **_flash_attention(params, room.flash_attn),
        )  # fmt: skip
        if room.n_seq > 1:
            set_fields(params, kv_unified=True)
        if hasattr(params, "op_offload"):
            set_fields(params, op_offload=room.offload)
        if observe is not None:
            self.callback = llama_cpp.ggml_backend_sched_eval_callback(observe)  # kept alive with the context
            set_fields(params, cb_eval=self.callback)
        return llama_cpp.llama_init_from_model(model, params)

    def decode(self, context: Handle, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int]) -> int:
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence) in enumerate(zip(tokens, positions, sequences, strict=True)):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, 1
            batch.seq_id[i][0] = sequence
        code = int(llama_cpp.llama_decode(context, batch))
        llama_cpp.llama_batch_free(batch)
        return code


def _flash_attention(params: Any, wanted: bool) -> dict[str, Any]:
    """The field that turns it on, as this version has it: of three values, or of two."""
    name = "flash_attn" if hasattr(params, "flash_attn") else "flash_attn_type"
    return {name: wanted}
