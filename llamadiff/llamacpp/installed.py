"""llama.cpp through ctypes structures: llama-cpp-python's own, which are asked for what they have, or others."""

from __future__ import annotations

import ctypes
from typing import Any

from llamadiff.llamacpp.interface import MOST_PARTS, OBSERVE, Handle, Ids, Library, Loading, Observe, Room
from llamadiff.llamacpp.layout import Address, tensor_structure
from llamadiff.llamacpp.library import set_fields


class Installed(Library):
    """A llama.cpp whose functions that take structures, those of ``api``, are called with ctypes's."""

    def __init__(self, lib: Any, name: str, api: Any) -> None:
        super().__init__(lib, name)
        self.api = api

    def structure(self) -> type[ctypes.Structure]:
        return tensor_structure(self.lib)

    def load(self, path: bytes, loading: Loading) -> Handle:
        params = self.api.llama_model_default_params()
        set_fields(params, n_gpu_layers=loading.layers, use_extra_bufts=loading.repack, vocab_only=loading.vocab_only)
        if loading.devices or not loading.layers:  # no list would be all GPUs, whatever has layers there
            self.chosen = (ctypes.c_void_p * (1 + len(loading.devices)))(*loading.devices)  # kept while it is loaded
            set_fields(params, devices=ctypes.cast(self.chosen, ctypes.c_void_p), split_mode=loading.split)
        if loading.parts:
            self.parts = (ctypes.c_float * MOST_PARTS)(*loading.parts)
            kind = dict(params._fields_).get("tensor_split", Address)
            set_fields(params, tensor_split=ctypes.cast(self.parts, kind))
        return self.api.llama_model_load_from_file(path, params)

    def context(self, model: Handle, room: Room, observe: Observe | None) -> Handle:
        params = self.api.llama_context_default_params()
        flash_attn = "flash_attn" if hasattr(params, "flash_attn") else "flash_attn_type"  # of two values, or of three
        set_fields(
            params, n_ctx=room.n_ctx, n_batch=room.n_batch, n_ubatch=room.n_ubatch, n_seq_max=room.n_seq,
            type_k=room.type_k, type_v=room.type_v, n_threads=room.threads, n_threads_batch=room.threads,
            embeddings=room.pooled, rope_freq_base=room.rope_base, rope_freq_scale=room.rope_scale,
            **{flash_attn: room.flash_attn},
        )  # fmt: skip
        if room.n_seq > 1:
            set_fields(params, kv_unified=True)
        if hasattr(params, "op_offload"):
            set_fields(params, op_offload=room.offload)
        if observe is not None:
            self.callback = OBSERVE(observe)  # kept alive with the context
            kind = dict(params._fields_).get("cb_eval", Address)
            set_fields(params, cb_eval=ctypes.cast(self.callback, kind))
        return self.api.llama_init_from_model(model, params)

    def decode(self, context: Handle, tokens: Ids, positions: Ids, sequences: Ids, logits: Ids) -> int:
        batch = self.api.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence, wanted) in enumerate(zip(tokens, positions, sequences, logits, strict=True)):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
            batch.seq_id[i][0] = sequence
        code = int(self.api.llama_decode(context, batch))
        self.api.llama_batch_free(batch)
        return code
