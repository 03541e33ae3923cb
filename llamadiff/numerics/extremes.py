"""The shape of a layer's output: its kurtosis, and its largest value with the token and the channel that has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.numerics.compiled import rows as compiled

Array = NDArray[Any]
BLOCK = 1 << 16  # values that are widened at once: with what is made of them they stay in cache


@dataclass(frozen=True)
class Extremes:
    """``kurtosis`` is that of all values, E[(x - mean)^4] / variance^2: 3 of a normal distribution.

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


def extremes(values: Array, mean: float) -> Extremes | None:
    """Of rows [token, channel], whose values have this mean; None where not all are finite, or there are none."""
    if not values.size or not np.isfinite(mean):
        return None
    found = compiled.moments(values, mean)
    *sums, place = _moments(values, mean) if found is None else found
    if not np.isfinite(sums).all():
        return None
    token, channel = (int(i) for i in np.unravel_index(place, values.shape))
    row = np.abs(values[token].astype(np.float64))
    peak, middle = float(values[token, channel]), _median(row)
    times = abs(peak) / middle if middle > 0 else float("inf")
    return Extremes(_kurtosis(values.size, *sums), peak, token, channel, times)


def _kurtosis(count: int, squares: float, _: float, fourths: float) -> float:
    """Of so many values, from sums of powers; 0 where all values are the same."""
    variance = squares / count
    return fourths / count / variance**2 if variance > 0 else 0.0


def _median(values: Array) -> float:
    """NumPy's own would import much that nothing here needs."""
    half = len(values) // 2
    ordered = np.partition(values, [max(0, half - 1), half])
    return float(ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2)


def _moments(values: Array, mean: float) -> tuple[float, float, float, int]:
    """In float64: the sums of the powers two to four of what values are from their mean; where the largest one is."""
    squares = cubes = fourths = 0.0
    step = max(1, BLOCK // values.shape[1])
    for start in range(0, len(values), step):
        gaps = values[start : start + step].astype(np.float64)
        gaps -= mean
        squared = gaps * gaps
        squares += float(squared.sum())
        cubes += float(np.vdot(squared, gaps))
        fourths += float(np.vdot(squared, squared))
    return squares, cubes, fourths, int(np.abs(values).argmax())
