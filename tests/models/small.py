"""Small GGUF models that the tests write for themselves: any architecture of the engine, any option of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from models.gguf_file import finish

EMBD, FF, VOCAB, DIM = 256, 512, 96, 64
F32 = ("ffn_gate_inp", "ssm_a", "ssm_d", "ssm_conv1d", "ssm_norm", "conv")  # stems of matrices that no file quantizes


def no_tokenizer(writer: gguf.GGUFWriter) -> None:
    """A vocabulary without a tokenizer: prompts are given as ids."""
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(VOCAB)


def write_model(
    path: Path,
    arch: str = "llama",
    kind: str = "F16",
    *,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    experts: int = 0,
    bias: bool = False,
    qk_norm: bool = False,
    qk_norm_rows: bool = False,
    pre_norm: bool = True,
    post_norm: bool = False,
    layer_norm: bool = False,
    tied: bool = False,
    fused_qkv: bool = False,
    bos: int | None = None,
    extra: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray | tuple[np.ndarray, Type]] | None = None,
    drop: tuple[str, ...] = (),
    tokenizer: Callable[[gguf.GGUFWriter], None] = no_tokenizer,
    seed: int = 1,
) -> Path:
    """Write a model with random weights. ``extra`` sets metadata (without the architecture's prefix), ``tensors`` adds
    or replaces tensors, as they are; one of a block type is its bytes and the type; ``drop`` names stems left out."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, arch)
    for key, value in _metadata(layers, heads, kv_heads, experts, extra or {}).items():
        _add(writer, f"{arch}.{key}", value)
    tokenizer(writer)
    if bos is not None:
        writer.add_bos_token_id(bos)
    q, kv = heads * DIM, kv_heads * DIM

    def matrix(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    def vector(size: int, mean: float = 0.0) -> np.ndarray:
        return (mean + 0.3 * rng.standard_normal(size)).astype(np.float32)

    all_tensors = {"token_embd.weight": matrix(VOCAB, EMBD), "output_norm.weight": vector(EMBD, 1.0)}
    if layer_norm:
        all_tensors["output_norm.bias"] = vector(EMBD)
    if not tied:
        all_tensors["output.weight"] = matrix(VOCAB, EMBD)
    for i in range(layers):
        norms = [("attn_norm", "ffn_norm")] * pre_norm + [("post_attention_norm", "post_ffw_norm")] * post_norm
        layer = {f"{name}.weight": vector(EMBD, 1.0) for pair in norms for name in pair}
        parts = {"attn_q": q, "attn_k": kv, "attn_v": kv}
        if fused_qkv:
            layer["attn_qkv.weight"] = matrix(q + 2 * kv, EMBD)
        else:
            layer |= {f"{name}.weight": matrix(size, EMBD) for name, size in parts.items()}
        if bias:
            layer |= {f"{name}.bias": vector(size) for name, size in parts.items()}
        if layer_norm:
            layer |= {f"{name}.bias": vector(EMBD) for name in ("attn_norm", "ffn_norm")}
        if qk_norm:
            layer |= {f"attn_{part}_norm.weight": vector(DIM, 1.0) for part in "qk"}
        if qk_norm_rows:
            layer |= {f"attn_{part}_norm.weight": vector(size, 1.0) for part, size in (("q", q), ("k", kv))}
        layer["attn_output.weight"] = matrix(EMBD, q)
        layer |= _ffn(matrix, experts)
        all_tensors |= {f"blk.{i}.{name}": values for name, values in layer.items()}
    kept = {name: values for name, values in all_tensors.items() if name.split(".")[-2] not in drop}
    for name, values in (kept | (tensors or {})).items():
        _add_tensor(writer, name, values, Type[kind])
    finish(writer)
    return path


def _ffn(matrix: Any, experts: int) -> dict[str, np.ndarray]:
    if not experts:
        return {
            "ffn_gate.weight": matrix(FF, EMBD),
            "ffn_up.weight": matrix(FF, EMBD),
            "ffn_down.weight": matrix(EMBD, FF),
        }
    return {
        "ffn_gate_inp.weight": matrix(experts, EMBD),
        "ffn_gate_exps.weight": matrix(experts, FF, EMBD),
        "ffn_up_exps.weight": matrix(experts, FF, EMBD),
        "ffn_down_exps.weight": matrix(experts, EMBD, FF),
    }


def _metadata(layers: int, heads: int, kv_heads: int, experts: int, extra: dict[str, Any]) -> dict[str, Any]:
    fields = {
        "block_count": layers, "context_length": 256, "embedding_length": EMBD, "feed_forward_length": FF,
        "attention.head_count": heads, "attention.head_count_kv": kv_heads, "attention.key_length": DIM,
        "attention.value_length": DIM, "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    if experts:
        fields |= {"expert_count": experts, "expert_used_count": 2, "expert_feed_forward_length": FF}
    fields |= extra
    return {key: value for key, value in fields.items() if value is not None}


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
           list: writer.add_array}[type(value)]  # fmt: skip
    add(key, value)


def _add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray | tuple[np.ndarray, Type], kind: Type) -> None:
    """Matrices in the model's type, vectors and routers in float32."""
    if isinstance(values, tuple):
        writer.add_tensor(name, values[0], raw_dtype=values[1])
    elif values.dtype != np.float32 or values.ndim == 1 or kind == Type.F32 or _stays_f32(name):
        writer.add_tensor(name, values)
    elif kind == Type.F16:
        writer.add_tensor(name, values.astype(np.float16))
    else:
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)


def _stays_f32(name: str) -> bool:
    return name.endswith(".bias") or any(f".{stem}" in name for stem in F32)
