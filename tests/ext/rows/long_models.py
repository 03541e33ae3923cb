"""Small models of a long context: plain, with scaled RoPE, with windows; their prompts, and rows of these."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from models.options import OPTIONS
from models.small import write_model

_RNG = np.random.default_rng(8)
IDS = 400  # of a vocabulary that eight bits cannot count


def _many_ids(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(IDS)


def _noise(*shape: int) -> np.ndarray:
    return (_RNG.standard_normal(shape) / 16).astype(np.float32)


ORIGINAL, WINDOW = 512, 128
LONG = {"context_length": 40000}
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": ORIGINAL,
}
OLMO2 = {"arch": "olmo2", "pre_norm": False, "post_norm": True, "qk_norm_rows": True}
PATTERN = {"attention.sliding_window_pattern": [True, False]}
MODELS: dict[str, Any] = {
    "plain": {"extra": LONG},
    "linear": {"extra": LONG | {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}},
    "yarn": {"extra": LONG | YARN},
    "long": {
        **OPTIONS["phi3"],
        "extra": {
            **OPTIONS["phi3"]["extra"], **LONG, "rope.scaling.original_context_length": ORIGINAL,
            "rope.scaling.attn_factor": 1.2,
        },
    },
    "window": {**OLMO2, "extra": LONG | PATTERN | {"attention.sliding_window": WINDOW}},
    "window-4096": {**OLMO2, "extra": LONG | PATTERN | {"attention.sliding_window": 4096}},
    "loud": {"kind": "F32", "extra": LONG, "tensors": {
        "blk.0.attn_q.weight": 90 * _noise(256, 256), "blk.0.attn_k.weight": 90 * _noise(128, 256),
        "blk.0.ffn_down.weight": 20000 * _noise(256, 512),
    }},
    "ids": {"extra": LONG, "tensors": {"token_embd.weight": _noise(IDS, 256), "output.weight": _noise(IDS, 256)},
            "tokenizer": _many_ids},
}  # fmt: skip
SMALLER = {"layers": 1, "heads": 2, "kv_heads": 1}  # of a prompt so long that llama.cpp takes minutes: "plain" alone


def write_long_model(folder: Path, name: str, smaller: bool = False) -> Path:
    return write_model(folder / f"{name}.gguf", **MODELS[name] | (SMALLER if smaller else {}))


def tokens_of(name: str, length: int) -> list[int]:
    return np.random.default_rng(3).integers(3, IDS if name == "ids" else 90, length).tolist()


def rows_of(length: int) -> list[int]:
    """Both ends, beside windows' and chunks' ends and powers of two, and some by chance."""
    edges = [edge + by for edge in (128, 256, 500, 512, 2048, 4096, 8192, 16384, 32768) for by in range(-4, 4)]
    by_chance = np.random.default_rng(4).choice(length, 64, replace=False).tolist()
    rows = {*range(8), *range(length - 64, length), *edges, *by_chance}
    return sorted(row for row in rows if row < length)
