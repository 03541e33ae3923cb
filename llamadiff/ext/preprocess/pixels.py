"""A picture's levels, edited as a mistake would: another colour space, a curve, a neighbourhood, a flip."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
LUMA = (0.299, 0.587, 0.114)


def edited(values: Array, how: Mapping[str, Any]) -> Array:
    """Levels [row, column, channel] of a picture with whatever ``how`` names done to them."""
    if "hat" in how:
        values = _hat(values, *how["hat"])
    if "ring" in how:
        values = ring(values, *how["ring"])
    if "matrix" in how:
        values = rounded(values @ np.array(how["matrix"]).T + np.array(how["offset"]))
    if "curve" in how:
        curve = np.array(how["curve"])  # [channel, level]
        values = rounded(np.stack([curve[n][values[..., n]] for n in range(3)], -1))
    if "rings" in how:
        weights = how["rings"]
        values = rounded(sum(weight * ring(values, *place) for weight, *place in weights))
    if how.get("channels"):
        values = values[..., how["channels"]]
    if "flip" in how:
        values = np.flip(values, how["flip"])
    if how.get("transposed"):
        values = values.swapaxes(0, 1)
    if how.get("quarter"):
        values = np.rot90(values, how["quarter"])
    return values


def rounded(values: Array) -> Array:
    """The nearest levels."""
    return np.asarray(np.clip(np.rint(values), 0, 255), np.uint8)


def _hat(values: Array, low: float, peak: float, high: float) -> Array:
    """How near levels are to one of some knots: 255 at it, 0 at those beside it."""
    return rounded(255 * np.interp(values, sorted({low, peak, high}),
                                   [float(x == peak) for x in sorted({low, peak, high})]))  # fmt: skip


def ring(values: Array, down: int, right: int) -> Array:
    """The mean of the pixels that are so far away on either side; those beyond an edge are the edge's."""
    rows, columns = (np.arange(n) for n in values.shape[:2])
    whole = np.zeros(values.shape)
    places = {(dy, dx) for dy in (-down, down) for dx in (-right, right)}
    for dy, dx in sorted(places):
        whole += values[np.clip(rows + dy, 0, rows[-1])][:, np.clip(columns + dx, 0, columns[-1])]
    return whole / len(places)
