"""Options of small models whose tensors are not llama's: one function an architecture."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf.quants import quantize
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


def gpt_oss(experts_as: Type | None = None, **extra: Any) -> Options:
    """Sinks, a window of three keys in the first layer, experts with biases, values that OAI-SwiGLU clamps."""

    def of_kind(values: np.ndarray) -> Any:
        return values if experts_as is None else (quantize(values, experts_as), experts_as)

    sizes = {"attn_output": EMBD, "ffn_gate_inp": 4}
    shapes = {"gate": (4, FF, EMBD), "up": (4, FF, EMBD), "down": (4, EMBD, FF)}
    return {
        "arch": "gpt-oss", "bias": True, "experts": 4, "drop": ("ffn_norm",),
        "extra": {"attention.sliding_window": 3, **extra},
        "tensors": both([
            ("attn_sinks.weight", lambda: vector(4)),
            ("post_attention_norm.weight", lambda: vector(EMBD, mean=1.0)),
            *((f"{stem}.bias", lambda size=size: vector(size)) for stem, size in sizes.items()),
            *((f"ffn_{part}_exps.bias", lambda shape=shape: vector(*shape[:2])) for part, shape in shapes.items()),
            *((f"ffn_{part}_exps.weight", lambda shape=shape: of_kind(4 * matrix(*shape)))
              for part, shape in shapes.items()),
        ]),
    }  # fmt: skip


def mamba2(n_heads: int = 8, groups: int = 2, width: int = 4) -> Options:
    """Eight heads in two groups; no attention, as its files say."""
    inner, state = 512, 32
    channels = inner + 2 * groups * state
    tensors = [
        ("ssm_in.weight", lambda: matrix(inner + channels + n_heads, EMBD)),
        ("ssm_conv1d.weight", lambda: matrix(channels, width)),
        ("ssm_conv1d.bias", lambda: vector(channels)),
        ("ssm_dt.bias", lambda: vector(n_heads)),
        ("ssm_a", lambda: -np.exp(vector(n_heads, 1))),
        ("ssm_d", lambda: vector(n_heads, 1)),
        ("ssm_norm.weight", lambda: vector(groups, inner // groups, mean=1.0)),
        ("ssm_out.weight", lambda: matrix(EMBD, inner)),
    ]
    return {
        "arch": "mamba2", "tensors": both(tensors),
        "drop": ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"),
        "extra": {
            "attention.head_count": 0, "attention.head_count_kv": None, "attention.key_length": None,
            "attention.value_length": None, "feed_forward_length": 0, "ssm.conv_kernel": width,
            "ssm.inner_size": inner, "ssm.state_size": state, "ssm.time_step_rank": n_heads, "ssm.group_count": groups,
        },
    }  # fmt: skip
