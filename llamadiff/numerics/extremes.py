"""The shape of a layer's output: its kurtosis, and its largest value with the token and the channel that has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
BLOCK = 1 << 16  # values that are widened at once: with what is made of them they stay in cache


@dataclass(frozen=True)
class Extremes:
    """``kurtosis`` is E[(x - mean)^4] / variance^2 over all values: 3 of a normal distribution.

    ``peak`` is the value of largest magnitude, of ``token`` and ``channel``; ``times`` is that magnitude over the
    median one of the token's values.
    """

    kurtosis: float
    peak: float
    token: int
    channel: int
    times: float

    @property
    def size(self) -> float:
        """The largest magnitude."""
        return abs(self.peak)


def extremes(values: Array) -> Extremes | None:
    """Of rows [token, channel]; None where there is nothing finite to tell of."""
    if not values.size or not np.isfinite(values).all():
        return None
    place = int(np.abs(values).argmax())
    token, channel = (int(i) for i in np.unravel_index(place, values.shape))
    row = np.abs(values[token].astype(np.float64))
    peak, middle = float(values[token, channel]), float(np.median(row))
    times = abs(peak) / middle if middle > 0 else float("inf")
    return Extremes(_kurtosis(values), peak, token, channel, times)


def _kurtosis(values: Array) -> float:
    """E[(x - mean)^4] / variance^2 of rows; 0 where all values are the same. In float64, some rows at a time."""
    step = max(1, BLOCK // values.shape[1])
    parts = [values[start : start + step] for start in range(0, len(values), step)]
    mean = sum(float(part.sum(dtype=np.float64)) for part in parts) / values.size
    squares = fourths = 0.0
    for part in parts:
        gaps = part.astype(np.float64)
        gaps -= mean
        np.multiply(gaps, gaps, out=gaps)
        squares += float(gaps.sum())
        fourths += float(np.vdot(gaps, gaps))
    variance = squares / values.size
    return fourths / values.size / variance**2 if variance > 0 else 0.0
