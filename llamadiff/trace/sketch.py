"""Sketches: a trace whose tensors are a few numbers a token. A safetensors file too, with the same metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from llamadiff.system.errors import UserError
from llamadiff.system.output import write_whole
from llamadiff.trace import taps
from llamadiff.trace.metadata import KEY, Info, Size
from llamadiff.trace.stated import brief, convert

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


class _Stated(Struct):
    """What the metadata of a sketch must say."""

    seed: Annotated[int, Meta(ge=0, lt=1 << 12)]
    projections: Annotated[int, Meta(ge=1, le=MOST)]
    taps: Annotated[dict[str, Any], Meta(min_length=1, max_length=MAX_TAPS)]


_Shape = Annotated[tuple[Size, ...], Meta(min_length=1, max_length=8)]


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
    stated = convert(info.sketch, _Stated, f"{path}: sketch", "record it again")
    k = stated.projections
    if others := [name for name in stated.taps if taps.parse(name) is None]:
        raise UserError(f"{path}: sketch: taps has {brief(others[0])}, which is no tap's name; record it again")
    shapes: dict[str, tuple[int, ...]] = {
        name: convert(shape, _Shape, f"{path}: sketch: the shape of {name}", "record it again")
        for name, shape in stated.taps.items()
    }
    wanted = (len(shapes), len(info.tokens), len(MOMENTS) + k)
    if values is None or values.shape != wanted or values.dtype.kind != "f":
        found = None if values is None else list(values.shape)
        raise UserError(f"{path}: tensor {TENSOR} has shape {found}; {list(wanted)} is expected, of float32")
    rows = {
        name: RowSketch(part[:, : len(MOMENTS)], part[:, len(MOMENTS) :], math.prod(shape) // len(info.tokens))
        for (name, shape), part in zip(shapes.items(), np.asarray(values), strict=True)
    }
    return Sketch(stated.seed, k, shapes, rows)
