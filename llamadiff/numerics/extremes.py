"""The shape of a layer's output: its kurtosis, and its largest value with the token and the channel that has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


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
    wide = values.astype(np.float64)
    token, channel = (int(i) for i in np.unravel_index(int(np.abs(wide).argmax()), wide.shape))
    peak, middle = float(wide[token, channel]), float(np.median(np.abs(wide[token])))
    gap = wide - wide.mean()
    variance = float(np.mean(gap * gap))
    kurtosis = float(np.mean(gap**4)) / variance**2 if variance > 0 else 0.0
    return Extremes(kurtosis, peak, token, channel, abs(peak) / middle if middle > 0 else float("inf"))
