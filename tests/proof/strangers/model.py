"""A GGUF file as a stranger reads it: its hyper-parameters, and every weight in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from proof.strangers.architectures import ARCHITECTURES, Architecture

Array = np.ndarray


@dataclass(frozen=True)
class Hyper:
    """What the metadata says. ``pairs``: RoPE rotates (2i, 2i+1), not (i, i + n/2)."""

    arch: Architecture
    layers: int
    embd: int
    heads: int
    kv_heads: int | list[int]
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
        return self.arch.positions == "pairs"

    @property
    def layer_norm(self) -> bool:
        return self.arch.layer_norm


@dataclass(frozen=True)
class File:
    """One model: metadata without the architecture's prefix, tensors by name, matrices [out, in]."""

    path: Path
    hyper: Hyper
    fields: Mapping[str, Any]
    tensors: Mapping[str, Array]

    def get(self, key: str, default: Any = 0) -> Any:
        return self.fields.get(key, default)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def __getitem__(self, name: str) -> Array:
        return self.tensors[name]


def read(path: Path) -> File:
    """Everything of a file, dequantized by gguf-py."""
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    arch = fields["general.architecture"]
    own = {name.removeprefix(f"{arch}."): value for name, value in fields.items() if name.startswith(f"{arch}.")}
    tensors = {tensor.name: decoded(tensor) for tensor in reader.tensors}
    return File(Path(path), _hyper(ARCHITECTURES[arch], own.get), own, tensors)


def decoded(tensor: Any) -> Array:
    """A tensor's values, its axes as NumPy has them."""
    shape = tuple(int(n) for n in reversed(tensor.shape))
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    return np.ascontiguousarray(values, np.float32).reshape(shape)


def _hyper(arch: Architecture, get: Callable[..., Any]) -> Hyper:
    heads, embd = get("attention.head_count", 0), get("embedding_length", 0)
    dim = get("attention.key_length_mla") or get("attention.key_length", embd // max(heads, 1))
    rms, plain = get("attention.layer_norm_rms_epsilon"), get("attention.layer_norm_epsilon")
    return Hyper(
        arch, get("block_count", 0), embd, heads, get("attention.head_count_kv", heads), dim,
        float(np.float32(rms if rms is not None else plain)), get("rope.dimension_count", dim),
        float(get("rope.freq_base", 10000.0)), get("rope.scaling.type", ""), float(get("rope.scaling.factor", 1.0)),
        get("rope.scaling.original_context_length", 0), get("expert_used_count", 0),
    )  # fmt: skip
