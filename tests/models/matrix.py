"""A file with one matrix of any type."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from llamaref import Weights

from models.small import write_model

NAME = "blk.0.ffn_down.weight"


def weights_of(path: Path, kind: str, n_out: int, n_in: int) -> Weights:
    """Its blocks are finite."""
    number = gguf.GGMLQuantizationType[kind]
    drawn = np.random.default_rng(3).standard_normal((n_out, n_in)).astype(np.float32)
    if kind in ("F32", "F16"):
        data = drawn.astype(np.float16 if kind == "F16" else np.float32)
    elif kind in ("Q6_K", "Q4_K", "Q5_K", "IQ4_XS"):
        size = gguf.GGML_QUANT_SIZES[number][1]
        blocks = np.random.default_rng(4).integers(0, 256, (n_out, n_in // 256, size), np.uint8)
        scales = (0.01 * np.random.default_rng(5).standard_normal((n_out, n_in // 256, 2))).astype(np.float16)
        at = slice(size - 2, size) if kind == "Q6_K" else slice(0, 2 if kind == "IQ4_XS" else 4)
        blocks[..., at] = scales.view(np.uint8)[..., : at.stop - at.start]
        data = blocks.reshape(n_out, -1), number
    else:
        data = gguf.quants.quantize(drawn, number), number
    return Weights(write_model(path, kind="F32", tensors={NAME: data}))
