"""A product by a weight of the file that is yet to be computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from llamaref.weights import Weights

Array = NDArray[Any]


@dataclass(frozen=True)
class WeightProduct:
    """x @ W.T + bias: ``x`` [b, t, in], ``sums`` [b, t, in / 32] as ``Weights.product`` takes them, ``bias`` [out]."""

    weights: Weights
    name: str
    x: Array
    sums: Array | None = None
    bias: Array | None = None

    @property
    def width(self) -> int:
        """How many channels it has."""
        return self.weights.shape(self.name)[0]
