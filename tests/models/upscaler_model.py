"""An upscaler (ESRGAN) of random weights, under the names that stable-diffusion.cpp reads (its src/esrgan.hpp)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

FEATURES, GROWN = 64, 32  # channels, which the program knows by itself


def write_upscaler(path: Path, blocks: int = 1, seed: int = 1) -> Path:
    """Write one that makes an image four times as wide and as high."""
    random = np.random.default_rng(seed)
    weights = dict[str, np.ndarray]()
    for name, into, out in convolutions(blocks):
        weights[f"{name}.weight"] = random.normal(0, (9 * into) ** -0.5, (out, into, 3, 3)).astype(np.float16)
        weights[f"{name}.bias"] = random.normal(0, 0.1, out).astype(np.float32)
    save_file(weights, path)
    return path


def convolutions(blocks: int) -> Iterator[tuple[str, int, int]]:
    """Their names, and how many channels go in and come out."""
    yield "conv_first", 3, FEATURES
    for dense in (f"body.{block}.rdb{number}" for block in range(blocks) for number in (1, 2, 3)):
        for n in range(1, 6):
            yield f"{dense}.conv{n}", FEATURES + (n - 1) * GROWN, GROWN if n < 5 else FEATURES
    for name in ("conv_body", "conv_up1", "conv_up2", "conv_hr"):
        yield name, FEATURES, FEATURES
    yield "conv_last", FEATURES, 3
