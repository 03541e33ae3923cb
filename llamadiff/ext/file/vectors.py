"""Test blocks of every ggml type with the right answer, for engines in any language: ``llamadiff vectors DIR``.

For each type: ``TYPE.bin``, blocks as a file keeps them; ``TYPE.npy``, what gguf-py makes of them, float32; and
``TYPE.json`` with both and the fields' places. All are tensors of ``vectors.gguf`` too, so that an engine's answers
can be judged: ``llamadiff weights DIR/vectors.gguf ANSWERS/`` with ``ANSWERS/TYPE.npy`` (or .f32).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from llamaref.block_file import write_blocks
from llamaref.weights import block_sizes
from numpy.typing import NDArray

from llamadiff.ext.file.blocks.fields import FIELDS, values_of
from llamadiff.system.errors import UserError
from llamadiff.system.output import write_text
from llamadiff.system.progress import Progress, silent

Array = NDArray[Any]
ARCHITECTURE = "vectors"
FILE = "vectors.gguf"
ROWS, WIDTH = 16, 1024
RANDOM = 12  # rows of random quants; the others are extremes
SCALE, MINIMUM = 0.01, 0.02
HALVES = {"d": SCALE, "m": MINIMUM}
EXTREMES = (65504.0, -SCALE, 6e-8, 0.0)  # of every second scale and minimum in the rows that are not random


def write_vectors(folder: Path, progress: Progress = silent) -> int:
    """Write all types' files into a new or empty directory, and say how many types there are. Raises UserError."""
    _check(folder)
    folder.mkdir(exist_ok=True)
    tensors = {}
    for number, kind in enumerate(FIELDS):
        progress(f"writing {kind}", number, len(FIELDS))
        rows = vector_blocks(kind)
        tensors[kind] = (kind, rows)
        values = values_of(kind, rows)
        (folder / f"{kind}.bin").write_bytes(rows.tobytes())
        np.save(folder / f"{kind}.npy", values)
        write_text(folder / f"{kind}.json", _as_json(kind, rows, values))
    write_blocks(folder / FILE, ARCHITECTURE, tensors)
    return len(tensors)


def _check(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: is there already; give the name of a new or empty directory")
    if not folder.parent.is_dir() or not os.access(folder.parent, os.W_OK):
        raise UserError(f"{folder}: cannot be made ({folder.parent} is no directory that can be written to)")


def vector_blocks(kind: str) -> Array:
    """Rows of blocks: every bit of every field is set somewhere, and the last rows are extremes: [row, bytes]."""
    values, size = block_sizes(kind)
    rng = np.random.default_rng([ord(character) for character in kind])
    per_row = WIDTH // values
    blocks = rng.integers(0, 256, (ROWS, per_row, size), np.uint8)
    blocks[RANDOM], blocks[RANDOM + 1] = 0, 255
    for name, (first, last) in FIELDS[kind].items():
        if name in HALVES:
            blocks[..., first:last] = _halves(rng, name, (ROWS, per_row))
        elif name == "e":
            blocks[..., first:last] = _exponents(rng, kind, (ROWS, per_row, last - first))
    if kind == "IQ1_M":  # its scale is four nibbles of the scales
        blocks[..., 48:56] = _spread(blocks[..., 48:56], _halves(rng, "d", (ROWS, per_row)))
    if kind in ("F16", "BF16"):
        blocks = _finite(kind, blocks)
    return blocks.reshape(ROWS, -1)


def _halves(rng: np.random.Generator, name: str, shape: tuple[int, int]) -> Array:
    """Float16 of a block's scale or minimum, as bytes: no two alike, the last rows extreme."""
    found = HALVES[name] * rng.uniform(0.5, 1.5, shape)
    if name == "m":
        found[::2] *= -1
    for row, value in zip(range(RANDOM, ROWS), EXTREMES, strict=True):
        found[row, 1::2] = value
    return found.astype(np.float16)[..., None].view(np.uint8)


def _exponents(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> Array:
    """Powers of two (MXFP4), or floats of eight bits (NVFP4), none of them NaN."""
    low, high = (100, 140) if kind == "MXFP4" else (0x20, 0x58)
    found = rng.integers(low, high, shape, np.uint8)
    found[RANDOM:, :4:2] = np.array([0, 1, 2, 0x7E], np.uint8)[:, None, None][: len(found[RANDOM:])]
    return found


def _spread(scales: Array, halves: Array) -> Array:
    """IQ1_M's scales with a float16 in the high nibble of every second byte."""
    bits = np.ascontiguousarray(halves).view(np.uint16)[..., 0]
    out = scales.copy()
    for part in range(4):
        out[..., 2 * part + 1] = (out[..., 2 * part + 1] & 15) | ((bits >> (4 * part) & 15) << 4).astype(np.uint8)
    return out


def _finite(kind: str, blocks: Array) -> Array:
    """Sixteen-bit floats of every exponent but those of NaN and infinity."""
    words = blocks.view(np.uint16)[..., 0]
    mask = 0x7C00 if kind == "F16" else 0x7F80
    words = np.where((words & mask) == mask, words & ~np.uint16(mask & (mask >> 1)), words)
    return words.astype(np.uint16)[..., None].view(np.uint8)


def _as_json(kind: str, rows: Array, values: Array) -> str:
    per_block, size = block_sizes(kind)
    return json.dumps({
        "type": kind, "values_per_block": per_block, "bytes_per_block": size, "shape": list(values.shape),
        "fields": {name: {"from": first, "to": last} for name, (first, last) in FIELDS[kind].items()},
        "rows": [row.tobytes().hex() for row in rows],
        "values": [[float(value) if np.isfinite(value) else str(value) for value in row] for row in values],
    }) + "\n"  # fmt: skip
