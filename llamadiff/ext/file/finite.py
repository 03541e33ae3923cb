"""Where values that are not finite begin in a file: a key of its metadata, or a tensor's row and block."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from llamaref import ModelError, Weights
from llamaref.configure import read_config

from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.file.blocks.fields import blocks_of, field_of
from llamadiff.ext.file.oddities import broken_scales
from llamadiff.ext.file.statistics import gguf_decoder
from llamadiff.result.oddity import Oddity

AT_ONCE = 1 << 20  # values that are decoded at once
LARGEST = 0x7E  # NVFP4's largest scale, 448 as E4M3: of a tensor with a .scale, the block of its largest value has it
BASE = "rope.freq_base"


def not_finite(model: ModelFile, weight: str | None, layer: int | None) -> Oddity | None:
    """What of a file makes an op's values NaN or Inf on finite inputs: its ``weight``, or another tensor or key that
    the ops of this ``layer`` read. None if all of it is finite.
    """
    return next(_origins(model, weight, layer), None)


def _origins(model: ModelFile, weight: str | None, layer: int | None) -> Iterator[Oddity]:
    own = [name for name in model.tensors if name == weight or name.startswith(f"blk.{layer}.")]
    own += [name for name in model.tensors if not name.startswith("blk.") and name not in own]
    for name in sorted(own, key=lambda each: each != weight):
        said = where_not_finite(model.weights, name)
        if said is not None:
            yield Oddity(name, said, "not-finite")
    yield from bad_keys(model)
    yield from scale_missing(model.weights, weight) if weight is not None else ()


def where_not_finite(weights: Weights, name: str) -> str | None:
    """The first value of a tensor that is none, by its row and block; None if there is none, or nobody decodes it."""
    broken = next(broken_scales(weights, name), None)
    decode = gguf_decoder(weights, name)
    if broken is not None or decode is None:
        return broken
    stored = weights.read_raw(name)
    rows = stored.reshape(-1, stored.shape[-1])
    width = weights.shape(name)[-1]
    step = max(1, AT_ONCE // width)
    for start in range(0, len(rows), step):
        with np.errstate(all="ignore"):
            values = decode(rows[start : start + step])
        odd = ~np.isfinite(values)
        if odd.any():
            row, column = (int(i) for i in np.argwhere(odd)[0])
            value = "NaN" if np.isnan(values[row, column]) else "infinite"
            size = weights.block_size(name)
            place = f"block {column // size}" if size > 1 else f"value {column}"
            return f"row {start + row}, {place} is {value}"
    return None


def bad_keys(model: ModelFile) -> Iterator[Oddity]:
    """A key of the metadata that is not finite, or makes what is not."""
    for key, value in model.weights.fields.items():
        own = key.removeprefix(f"{model.architecture}.")
        if own == key or isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if not math.isfinite(value):
            yield Oddity("metadata", f"{key} = {value!r}: expected a finite number", "metadata")
        elif own == BASE and value <= 0:
            yield Oddity("metadata", _refusal(model) or f"{key} = {value!r}: must be greater than 1", "metadata")


def _refusal(model: ModelFile) -> str | None:
    """What the reference engine says of the metadata, in the words that ``weights`` has."""
    if model.has_engine:
        try:
            read_config(model.weights.fields)
        except ModelError as error:
            return str(error)
    return None


def scale_missing(weights: Weights, name: str) -> Iterator[Oddity]:
    """Blocks that were made to be multiplied by a .scale, which is not there."""
    if weights.type(name) != "NVFP4" or f"{name.removesuffix('.weight')}.scale" in weights:
        return
    scales = blocks_of("NVFP4", weights.read_raw(name))[:, field_of("NVFP4", "e")]
    if int(scales.max()) == LARGEST:
        says = "has no .scale, and its largest block's scale is 448, as of a tensor that has one: llama.cpp takes 1"
        yield Oddity(name, says, "scale-missing", certain=False)
