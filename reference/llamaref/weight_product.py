"""A product by a weight of the file that is yet to be computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from llamaref.weights import Weights

Array = NDArray[Any]


@dataclass(frozen=True)
class WeightProduct:
    """(x @ W.T) * scale + bias, which ``compute`` makes: ``x`` [b, t, in], ``sums`` [b, t, in / 32] as
    ``Weights.product`` takes them, ``scale`` and ``bias`` [out] where there are any.
    """

    compute: Callable[[], Array]
    weights: Weights
    name: str
    x: Array
    sums: Array | None = None
    scale: Array | None = None
    bias: Array | None = None

    @property
    def width(self) -> int:
        """How many channels it has."""
        return self.weights.shape(self.name)[0]
