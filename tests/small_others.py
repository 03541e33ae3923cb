"""Options of small models whose tensors are not llama's: one function an architecture."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from small import DIM, EMBD, FF

_RNG = np.random.default_rng(11)
Options = dict[str, Any]


def matrix(*shape: int) -> np.ndarray:
    return (_RNG.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)


def vector(*shape: int, mean: float = 0.0) -> np.ndarray:
    return (mean + 0.3 * _RNG.standard_normal(shape)).astype(np.float32)


def both(tensors: Iterable[tuple[str, Any]], layers: Iterable[int] = (0, 1)) -> dict[str, np.ndarray]:
    """Tensors of every layer: (name, what makes one)."""
    return {f"blk.{i}.{name}": make() for i in layers for name, make in tensors}


def phi3(n_rot: int = DIM, **extra: Any) -> Options:
    """Gate and up in one matrix, and factors for contexts longer and shorter than the original."""
    sides = {"long": 9, "short": 3}
    factors = {
        f"rope_factors_{side}.weight": np.linspace(1, last, n_rot // 2, dtype=np.float32)
        for side, last in sides.items()
    }
    return {
        "arch": "phi3", "kv_heads": 4, "drop": ("ffn_gate", "ffn_up"),
        "extra": {"rope.dimension_count": n_rot, **extra},
        "tensors": {**both([("ffn_up.weight", lambda: matrix(2 * FF, EMBD))]), **factors},
    }  # fmt: skip


def gpt2() -> Options:
    """Learned positions, one matrix for Q, K and V, biases throughout, no gate."""
    sizes = {"attn_qkv": 3 * EMBD, "attn_output": EMBD, "ffn_up": FF, "ffn_down": EMBD}
    return {
        "arch": "gpt2", "kv_heads": 4, "fused_qkv": True, "layer_norm": True, "drop": ("ffn_gate",), "tied": True,
        "extra": {"attention.layer_norm_epsilon": 1e-5, "attention.layer_norm_rms_epsilon": None},
        "tensors": {
            "position_embd.weight": vector(256, EMBD),
            **both([(f"{stem}.bias", lambda size=size: vector(size)) for stem, size in sizes.items()]),
        },
    }  # fmt: skip
