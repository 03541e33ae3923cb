"""A norm laid open: rows that are divided by a number of their own and multiplied by one weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.diagnose.read_back.observed import LEFT, Observed

Array = NDArray[Any]


@dataclass(frozen=True)
class Normed:
    """A norm's parts: rows ``x`` [row, n] (without their mean, where the model takes it off), weight and bias [n].

    ``y`` are the recorded rows and ``right`` the right ones, both without the bias.
    """

    o: Observed
    x: Array
    w: Array
    b: Array
    y: Array
    right: Array
    may_leave: float = LEFT

    def left(self, values: Array) -> float:
        """What of the error is left if these are the rows."""
        return self.o.left((values + self.b).reshape(self.o.recorded.shape))

    def fits(self, values: Array) -> bool:
        """Whether the recorded rows are these."""
        return self.left(values) <= self.may_leave

    @property
    def square(self) -> Array:
        """Each row's mean square."""
        return np.asarray(np.square(self.x).mean(axis=1))

    def factors(self, y: Array) -> Array:
        """One factor for each row, by which x * w comes nearest to y."""
        xw = self.x * self.w
        return np.asarray((y * xw).sum(axis=1) / np.maximum(np.square(xw).sum(axis=1), 1e-300))

    @property
    def epsilon(self) -> float:
        """The right one."""
        return float(np.median(self.factors(self.right) ** -2.0 - self.square))

    def by(self, size: Array) -> Array:
        """The rows divided by so much."""
        return self.x * self.w / size[:, None]


def _weight(o: Observed) -> str:
    """The norm's weight: where a graph does not say which it is, the one that has the tap's name."""
    word, layer = o.case.tap.kind.word, o.case.tap.layer
    return o.case.weight or ("output_norm.weight" if layer is None else f"blk.{layer}.{word}.weight")


def normed(o: Observed) -> Normed | None:
    """A norm's rows; None where the right values are no norm of the input."""
    case, name = o.case, _weight(o)
    w = case.vector(name)
    if w is None or o.recorded.shape[-1] != w.size:
        return None
    found = case.vector(name.replace(".weight", ".bias"))
    b = np.zeros(w.size) if found is None else np.asarray(found, np.float64)
    x, w = o.input().reshape(-1, w.size), np.asarray(w, np.float64)
    y, right = (side.reshape(x.shape) - b for side in (o.recorded, o.expected))
    for centred in (x, x - x.mean(axis=1, keepdims=True)):
        n = Normed(o, centred, w, b, y, right)
        left = np.square(right - n.factors(right)[:, None] * centred * w).sum()
        if left <= 1e-9 * np.square(right).sum():
            return n
    return None
