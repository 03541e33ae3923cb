"""A GGUF file as a stranger reads it: its hyper-parameters, and every weight in float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Array = np.ndarray
NEOX = ("qwen2", "qwen3", "qwen3moe", "stablelm")  # architectures whose RoPE rotates halves of a head


@dataclass(frozen=True)
class Hyper:
    """What the metadata says. ``pairs``: RoPE rotates (2i, 2i+1), not (i, i + n/2)."""

    arch: str
    layers: int
    embd: int
    heads: int
    kv_heads: int
    dim: int
    eps: float
    n_rot: int
    base: float
    scaling: str
    factor: float
    original: int
    used: int

    @property
    def pairs(self) -> bool:
        return self.arch not in NEOX

    @property
    def layer_norm(self) -> bool:
        return self.arch == "stablelm"


@dataclass(frozen=True)
class File:
    """One model: tensors by name, matrices [out, in]."""

    path: Path
    hyper: Hyper
    tensors: Mapping[str, Array]

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def __getitem__(self, name: str) -> Array:
        return self.tensors[name]


def read(path: Path) -> File:
    """Everything of a file, dequantized by gguf-py."""
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {tensor.name: decoded(tensor) for tensor in reader.tensors}
    return File(Path(path), _hyper(fields), tensors)


def decoded(tensor: Any) -> Array:
    """A tensor's values, its axes as NumPy has them."""
    shape = tuple(int(n) for n in reversed(tensor.shape))
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    return np.ascontiguousarray(values, np.float32).reshape(shape)


def _hyper(fields: Mapping[str, Any]) -> Hyper:
    arch = fields["general.architecture"]

    def get(key: str, default: Any) -> Any:
        return fields.get(f"{arch}.{key}", default)

    heads, embd = get("attention.head_count", 0), get("embedding_length", 0)
    dim = get("attention.key_length", embd // max(heads, 1))
    rms, plain = get("attention.layer_norm_rms_epsilon", None), get("attention.layer_norm_epsilon", None)
    return Hyper(
        arch, get("block_count", 0), embd, heads, get("attention.head_count_kv", heads), dim,
        float(np.float32(rms if rms is not None else plain)), get("rope.dimension_count", dim),
        float(get("rope.freq_base", 10000.0)), get("rope.scaling.type", ""), float(get("rope.scaling.factor", 1.0)),
        get("rope.scaling.original_context_length", 0), get("expert_used_count", 0),
    )  # fmt: skip
