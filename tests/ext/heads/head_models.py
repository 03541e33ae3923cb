"""Small models with heads that predict a token more: llama.cpp says which tensors they have, and loads them again."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from llama_cpp import llama_cpp as lib
from models import making
from models.gguf_file import finish
from places import TESTS

from llamadiff.llamacpp.tensors import Ggml

_SIZES = {
    "vocab_size": 128, "context_length": 1024, "embedding_length": 64, "block_count": 3, "feed_forward_length": 96,
    "attention.head_count": 4, "attention.head_count_kv": 2, "nextn_predict_layers": 1,
}  # fmt: skip
_RMS = {"attention.layer_norm_rms_epsilon": 1e-5}
_EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 48}
_SHARED = {"expert_shared_count": 1, "leading_dense_block_count": 1}
_DELTA = {
    "ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.state_size": 32, "ssm.time_step_rank": 4, "ssm.group_count": 2,
    "rope.dimension_sections": [2, 2, 2, 2], "rope.dimension_count": 16, "full_attention_interval": 2,
}  # fmt: skip
_TWO_HEADS = {
    "block_count": 4, "nextn_predict_layers": 2, "leading_dense_block_count": 1, "attention.sliding_window": 4,
    "attention.sliding_window_pattern": [True, False, True, True], "expert_shared_feed_forward_length": 48,
}  # fmt: skip
_LATENT = {
    "expert_gating_func": 2, "attention.head_count_kv": 1, "attention.q_lora_rank": 32, "attention.kv_lora_rank": 32,
    "attention.key_length": 40, "attention.value_length": 32, "attention.key_length_mla": 24,
    "attention.value_length_mla": 16, "rope.dimension_count": 8,
}  # fmt: skip
_INDEXER = {
    "attention.indexer.head_count": 2, "attention.indexer.key_length": 64, "attention.indexer.top_k": 64
}  # fmt: skip
KEYS: dict[str, dict[str, Any]] = {
    "glm4moe": {**_RMS, **_EXPERTS, **_SHARED, "expert_gating_func": 2, "expert_weights_norm": True,
                "expert_weights_scale": 1.5, "rope.dimension_count": 8},
    "qwen35": {**_RMS, **_DELTA},
    "qwen35moe": {**_RMS, **_DELTA, **_EXPERTS, "expert_shared_feed_forward_length": 48},
    "qwen3next": {**_RMS, **_DELTA, **_EXPERTS, "expert_shared_feed_forward_length": 48},
    "deepseek2": {**_RMS, **_EXPERTS, **_SHARED, **_LATENT},
    "deepseek32": {**_RMS, **_EXPERTS, **_SHARED, **_LATENT, **_INDEXER},
    "glm-dsa": {**_RMS, **_EXPERTS, **_SHARED, **_LATENT, **_INDEXER},
    "cohere2moe": {"attention.layer_norm_epsilon": 1e-5, **_EXPERTS, **_SHARED, "attention.sliding_window": 4,
                   "logit_scale": 0.5},
    "hy_v3": {**_RMS, **_EXPERTS, **_SHARED},
    "mimo2": {**_RMS, **_EXPERTS, **_TWO_HEADS},
    "step35": {**_RMS, **_EXPERTS, **_TWO_HEADS},
}  # fmt: skip
NAMES = tuple(KEYS)
LEFT_OUT = (".scale", ".input_scale")  # of types that these files have not
_FOUND: dict[str, np.ndarray] = {}


def write(folder: Path) -> None:
    """Write every model, by a process of its own: llama.cpp aborts on what it does not take."""
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, str(folder)]
    subprocess.run(command, cwd=TESTS, env=environment, check=True)


def write_all(folder: Path) -> None:
    """Every model in float32; the first one also as converters write it, in types of blocks."""
    making.start()
    for arch, own in KEYS.items():
        keys = {**_SIZES, **own}
        tensors = asked_for(folder / "metadata", arch, keys)
        tensors = fused(tensors) if arch == "mimo2" else tensors
        write_model(folder / f"{arch}.gguf", arch, keys, tensors)
        if arch in AGREEING:
            write_model(folder / f"{arch}.agrees.gguf", arch, keys, agreeing(tensors, keys["block_count"]))
    own = agreeing(_made["glm4moe"], 3)
    write_model(folder / "glm4moe.agrees.Q8_0.gguf", "glm4moe", {**_SIZES, **KEYS["glm4moe"]}, own, Type.Q8_0)
    write_model(folder / "glm4moe.F16.gguf", "glm4moe", {**_SIZES, **KEYS["glm4moe"]}, _made["glm4moe"], Type.F16)
    write_model(folder / "glm4moe.Q8_0.gguf", "glm4moe", {**_SIZES, **KEYS["glm4moe"]}, _made["glm4moe"], Type.Q8_0)


_made: dict[str, Mapping[str, np.ndarray]] = {}
_QKV = ("attn_q", "attn_k", "attn_v")


def fused(tensors: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """Q, K and V of the heads as one matrix."""
    out = dict(tensors)
    for i in (2, 3):
        parts = [out.pop(f"blk.{i}.{stem}.weight") for stem in _QKV]
        out[f"blk.{i}.attn_qkv.weight"] = np.concatenate(parts)
    return out


AGREEING = ("glm4moe", "qwen35", "qwen3next", "step35")  # one that keeps keys, states in two ways, two heads
BRANCHES = ("attn_output.weight", "ffn_down.weight", "ffn_down_exps.weight", "ffn_down_shexp.weight", "ssm_out.weight")


WEAK, MIXED = 0.1, 0.3


def agreeing(tensors: Mapping[str, np.ndarray], layers: int) -> Mapping[str, np.ndarray]:
    """Weights by which heads draft what the trunk goes on with, about as often as not: each layer adds little to its
    input, and a head takes the embedding, with some of the hidden state.
    """
    out = {name: x * np.float32(WEAK) if name.endswith(BRANCHES) else x for name, x in tensors.items()}
    table = out["token_embd.weight"]
    for i in range(layers):
        nextn = f"blk.{i}.nextn"
        if f"{nextn}.eh_proj.weight" in out:
            one = np.eye(table.shape[1], dtype=np.float32)
            own = {"eh_proj": np.hstack([one, np.float32(MIXED) * one]), "embed_tokens": table,
                   "shared_head_head": out.get("output.weight", table), "shared_head_norm": out["output_norm.weight"],
                   "enorm": np.ones(len(one), np.float32), "hnorm": np.ones(len(one), np.float32)}  # fmt: skip
            out |= {f"{nextn}.{stem}.weight": x for stem, x in own.items() if f"{nextn}.{stem}.weight" in out}
    return out


def asked_for(metadata: Path, arch: str, keys: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
    """The tensors that llama.cpp asks for, its heads' too, with random values."""
    making._write_metadata(metadata, arch, keys)
    held = making._GGML.gguf_init_from_file(bytes(metadata), making._Asked(True, None))
    metadata.unlink()
    _FOUND.clear()
    params = lib.llama_model_default_params()
    params.load_mtp = True
    model = lib.llama_model_init_from_user(held, _KEEP, None, params)
    assert model, f"{arch}: {''.join(making._SAID)[-500:]}"
    lib.llama_model_free(model)
    _made[arch] = {name: values for name, values in _FOUND.items() if not name.endswith(LEFT_OUT)}
    return _made[arch]


@lib.llama_model_set_tensor_data_t
def _KEEP(tensor: int, _data: object) -> None:  # noqa: N802
    """Keep a tensor that llama.cpp has made, with values."""
    node = Ggml().node(ctypes.c_void_p(tensor))
    shape = node.shape[next((i for i, size in enumerate(node.shape) if size != 1), 3) :]
    columns = shape[-1]
    x = making.values(node.name, int(np.prod(shape)) // columns, columns)
    _FOUND[node.name] = x.reshape(shape).astype(np.float32)


def write_model(
    path: Path, arch: str, keys: Mapping[str, Any], tensors: Mapping[str, np.ndarray], kind: Type = Type.F32
) -> None:
    """A GGUF file; matrices of the file's type where their rows are whole blocks."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_tokenizer_model("no_vocab")
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    for key, value in keys.items():
        add[type(value)](f"{arch}.{key}", value)
    for name, x in tensors.items():
        if kind == Type.F32 or x.ndim < 2 or "ffn_gate_inp" in name or x.shape[-1] % 32:
            writer.add_tensor(name, x)
        else:
            writer.add_tensor(name, gguf.quants.quantize(x, kind), raw_dtype=kind)
    finish(writer)


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
