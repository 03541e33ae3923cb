"""The small models of the tests, by name: what write_model is given."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as Type

from models.small import DIM, EMBD, VOCAB, write_model
from models.small_others import deepseek2, gpt2, gpt_oss, mamba2, phi3

_RNG = np.random.default_rng(7)


def _matrix(rows: int, columns: int, size: float = 1.0) -> np.ndarray:
    """Rows whose products with values around 1 are around ``size``."""
    return (size * _RNG.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)


def _vectors(**sizes: int) -> dict[str, np.ndarray]:
    """Biases of both layers."""
    names = [(f"blk.{i}.{stem}.bias", size) for i in range(2) for stem, size in sizes.items()]
    return {name: (0.3 * _RNG.standard_normal(size)).astype(np.float32) for name, size in names}


_STEMS = {"attn_output": EMBD, "ffn_gate": 512, "ffn_up": 512, "ffn_down": EMBD}


_SIZES = np.where(np.arange(VOCAB) % 2, 960.0, 16.0)[:, None].astype(np.float32)


OPTIONS = {
    "llama": {},
    "llama-deep": {"layers": 6},
    "moe": {"arch": "llama", "experts": 4},
    "qwen2": {"arch": "qwen2", "bias": True, "kv_heads": 4},
    "qwen3": {"arch": "qwen3", "qk_norm": True},
    "stablelm": {
        "arch": "stablelm",
        "layer_norm": True,
        "extra": {
            "attention.layer_norm_epsilon": 1e-5,
            "attention.layer_norm_rms_epsilon": None,
            "rope.dimension_count": 16,
            "use_parallel_residual": False,
        },
    },
    "olmo2": {
        "arch": "olmo2",
        "layers": 4,
        "pre_norm": False,
        "post_norm": True,
        "qk_norm_rows": True,
        "extra": {"attention.sliding_window": 3},
    },
    "granite": {
        "arch": "granite",
        "extra": {"attention.scale": 0.1, "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 6.0},
    },
    "gemma": {"arch": "gemma", "tied": True},
    "gemma2": {
        "arch": "gemma2",
        "layers": 3,
        "post_norm": True,
        "tied": True,
        "extra": {"attention.sliding_window": 3, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    },
    "gemma3": {
        "arch": "gemma3",
        "layers": 7,
        "post_norm": True,
        "qk_norm": True,
        "tied": True,
        "extra": {"attention.sliding_window": 3, "rope.freq_base": 1e6},
    },
    "smollm3": {"arch": "smollm3", "layers": 5},
    "qwen3moe": {"arch": "qwen3moe", "qk_norm": True, "experts": 4},
    "gpt2": gpt2(),
    "gpt-oss": gpt_oss(),
    "gpt-oss-mxfp4": gpt_oss(
        Type.MXFP4,
        **{
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
            "attention.sliding_window_pattern": [False, True],
        },
    ),
    "mamba2": mamba2(),
    "deepseek2": deepseek2(absorbed=True),
    "deepseek2-old": deepseek2(absorbed=False),
    "phi3": phi3(),
    "phi3-long": phi3(**{"rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.2}),
    "llama-base": {"extra": {"rope.freq_base": 500000.0}},
    "llama-linear": {"extra": {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}},
    "llama-yarn": {
        "extra": {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
        }
    },
    "llama-factors": {"tensors": {"rope_freqs.weight": np.linspace(1, 8, DIM // 2, dtype=np.float32)}},
    "llama-fused": {"fused_qkv": True},
    "llama-fused-bias": {"fused_qkv": True, "tensors": _vectors(attn_qkv=8 * DIM)},
    "qwen2-fused": {"arch": "qwen2", "fused_qkv": True, "bias": True, "kv_heads": 4},
    "llama-scaled": {
        "tensors": {f"blk.{i}.{stem}.scale": np.array([0.7], np.float32) for i in range(2) for stem in _STEMS},
    },
    "llama-biased": {"bias": True, "tensors": _vectors(**_STEMS)},
    "qwen2-head-biased": {
        "arch": "qwen2",
        "bias": True,
        "kv_heads": 4,
        "tensors": {"output.bias": np.linspace(-1, 1, VOCAB, dtype=np.float32)},
    },
    "llama-narrow": {
        "extra": {"feed_forward_length": EMBD},
        "tensors": {
            f"blk.{i}.ffn_{part}.weight": _matrix(EMBD, EMBD) for i in (0, 1) for part in ("gate", "up", "down")
        },
    },
    # what overflows: squares of the embedding's rows, exp of the scores, up
    "llama-large": {
        "tensors": {
            "token_embd.weight": _matrix(VOCAB, EMBD, 960.0),
            "blk.0.attn_q.weight": _matrix(4 * DIM, EMBD, 10.0),
            "blk.0.attn_k.weight": _matrix(2 * DIM, EMBD, 10.0),
            "blk.0.ffn_up.weight": _matrix(512, EMBD, 1e5),
        }
    },
    "llama-uneven": {"tensors": {"token_embd.weight": _SIZES * _matrix(VOCAB, EMBD)}},
    # epsilons that a float16 holds roughly, and not at all, with values as small
    "llama-faint": {
        "extra": {"attention.layer_norm_rms_epsilon": 1e-6},
        "tensors": {"token_embd.weight": _matrix(VOCAB, EMBD, 0.05)},
    },
    "llama-faintest": {
        "extra": {"attention.layer_norm_rms_epsilon": 1e-8},
        "tensors": {"token_embd.weight": _matrix(VOCAB, EMBD, 0.005)},
    },
}


def write_long(path: Path, name: str, kind: str = "F16", context: int = 8192, **more: object) -> Path:
    """Write one of them, for so many tokens."""
    options = OPTIONS[name]
    return write_model(
        path, kind=kind, **{**options, **more, "extra": {**options.get("extra", {}), "context_length": context}}
    )
