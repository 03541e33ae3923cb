"""Sketches: a trace whose tensors are a few numbers a token. A safetensors file too, with the same metadata."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.system.errors import UserError
from llamadiff.system.output import write_whole
from llamadiff.trace import taps
from llamadiff.trace.metadata import KEY, Info

Array = NDArray[Any]
TENSOR = "sketch"
MOMENTS = ("rms", "mean", "min", "max")
MOST = 64  # projections: one bit of a hash each
MAX_TAPS = 100_000


@dataclass(frozen=True)
class RowSketch:
    """A tensor's rows: ``moments`` [row, 4] as MOMENTS names them, over ``width`` values; ``projected`` [row, k]."""

    moments: Array
    projected: Array
    width: int


@dataclass(frozen=True)
class Sketch:
    """The sketches of a run's taps, with the shapes that these had, and what the signs are made of."""

    seed: int
    projections: int
    shapes: Mapping[str, tuple[int, ...]]
    rows: Mapping[str, RowSketch]


def write_sketch(path: Path, info: Info, sketch: Sketch) -> None:
    """Write a sketch, complete under its name or not at all."""
    from safetensors.numpy import save

    about = {"seed": sketch.seed, "projections": sketch.projections,
             "taps": {name: list(shape) for name, shape in sketch.shapes.items()}}  # fmt: skip
    packed = [np.concatenate([rows.moments, rows.projected], axis=1) for rows in sketch.rows.values()]
    values = np.ascontiguousarray(np.stack(packed), np.float32)  # [tap, token, moments and projections]
    data = save({TENSOR: values}, {KEY: replace(info, sketch=about).to_json()})
    write_whole(path, data)


def read_sketch(path: Path, info: Info, values: Array | None) -> Sketch:
    """What a sketch's file holds. Raises UserError for what cannot be meant."""
    seed, k = info.sketch.get("seed"), info.sketch.get("projections")
    shapes: Any = info.sketch.get("taps")
    if not (type(seed) is int and 0 <= seed < 1 << 12) or not (type(k) is int and 1 <= k <= MOST):
        raise UserError(f"{path}: the sketch has seed {_brief(seed)} and {_brief(k)} projections; expected 0 to 4095 "
                        f"and 1 to {MOST}")  # fmt: skip
    if not _are_taps(shapes):
        raise UserError(f"{path}: the sketch's taps are {_brief(shapes)}; expected a shape for each name")
    wanted = (len(shapes), len(info.tokens), len(MOMENTS) + k)
    if values is None or values.shape != wanted or values.dtype.kind != "f":
        found = None if values is None else list(values.shape)
        raise UserError(f"{path}: tensor {TENSOR} has shape {found}; {list(wanted)} is expected, of float32")
    rows = {
        name: RowSketch(part[:, : len(MOMENTS)], part[:, len(MOMENTS) :], math.prod(shape) // len(info.tokens))
        for (name, shape), part in zip(shapes.items(), np.asarray(values), strict=True)
    }
    return Sketch(seed, k, {name: tuple(shape) for name, shape in shapes.items()}, rows)


def _are_taps(shapes: Any) -> bool:
    """Whether these are shapes by the names of taps."""
    if not isinstance(shapes, dict) or not 0 < len(shapes) <= MAX_TAPS:
        return False
    return all(taps.parse(name) is not None and _is_shape(shape) for name, shape in shapes.items())


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and 0 < len(shape) <= 8 and all(type(n) is int and 0 < n < 1 << 31 for n in shape)


def _brief(value: Any) -> str:
    return json.dumps(value)[:60]
