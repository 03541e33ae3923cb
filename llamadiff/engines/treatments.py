"""What an engine may have done to a tap before it was recorded: undone, since only then it is the model's tap."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.engines.model_file import Runnable
from llamadiff.system.errors import UserError
from llamadiff.trace import taps

Array = NDArray[Any]
_TIMES = re.compile(r"times ([0-9]{1,9}(?:\.[0-9]{1,12})?(?:e-?[0-9]{1,2})?)")


@np.errstate(all="ignore")  # what overflows shows in the values
def undone(array: Array, tap: taps.Tap, done: Sequence[str], model: Runnable) -> Array:
    """A tap's values as they were before these treatments."""
    if done and array.dtype.kind != "f":
        array = array.astype(np.float32)
    if "repeated" in done:
        array = _one_copy(array, tap, model)
    if "permuted" in done and model.rope_pairs:
        array = _reorder_heads(array, model.sizes, (2, -1))
    if "paired" in done and not model.rope_pairs:
        array = _reorder_heads(array, model.sizes, (-1, 2))
    if "scaled" in done:
        array = array * np.sqrt(model.sizes["dim"]).astype(array.dtype)
    if "unweighted" in done:
        if tap.name not in model.weight_names:
            raise UserError(f'{tap.name}: done = ["unweighted"], but no weight of this model belongs to it')
        name = model.weight_names[tap.name]
        weight, bias = model.weights.vector(name), name.replace(".weight", ".bias")
        rows = array.reshape(-1, weight.size) * weight  # of a token, of a head, or of all groups of a token
        array = (rows + model.weights.vector(bias) if bias in model.weights else rows).reshape(array.shape)
    for factor in filter(None, map(factor_of, done)):
        array = array / array.dtype.type(factor)
    return array


def factor_of(treatment: str) -> float | None:
    """The number of ``times 0.5``; None for another treatment."""
    match = _TIMES.fullmatch(treatment)
    factor = float(match[1]) if match else 0.0
    return factor if 1e-30 < factor < 1e30 else None  # what float32 has room for, and its inverse too


def _one_copy(array: Array, tap: taps.Tap, model: Runnable) -> Array:
    """The first of each group's equal heads."""
    heads, kv_heads = model.sizes["head"], model.sizes["kv_head"]
    split = array.reshape(array.shape[0], kv_heads, heads // kv_heads, -1)
    if not np.array_equal(split, np.broadcast_to(split[:, :, :1], split.shape), equal_nan=True):
        raise UserError(f'{tap.name}: done = ["repeated"], but the {heads // kv_heads} copies of a head differ')
    own = taps.shape_of(tap, array.shape[0], model.sizes)
    return np.ascontiguousarray(split[:, :, 0]).reshape(own)


def _reorder_heads(array: Array, sizes: Mapping[str, int], split: tuple[int, int]) -> Array:
    """Values of each head, the rotated ones of them from halves (i, i + n/2) to pairs (2i, 2i + 1): ``split`` (2, -1);
    or the other way round: (-1, 2). RoPE may leave the last of a head alone.
    """
    dim = sizes["dim"]
    rotated = dim if sizes.get("lora") else sizes.get("rope", dim)
    heads = array.reshape(*array.shape[:-1], -1, dim)
    moved = heads[..., :rotated].reshape(*heads.shape[:-1], *split).swapaxes(-1, -2)
    moved = moved.reshape(*heads.shape[:-1], rotated)
    return np.concatenate([moved, heads[..., rotated:]], axis=-1).reshape(array.shape)
