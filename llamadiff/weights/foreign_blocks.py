"""A stranger's blocks beside the right ones, and what a misreading of them is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from llamaref.weights import decode
from numpy.typing import NDArray

Array = NDArray[Any]
Decode = Callable[[Array], Array]  # blocks [n, bytes] -> values [n, block]
NEAR = 1e-5  # squared error of a block, by its size, that a right reading may leave: sixteen-bit values have less
SHARE = 0.99  # of the blocks must fit: engines may do something else at the ends


@dataclass(frozen=True)
class Misreading:
    """A way to misread blocks, by the name of the mistake and in words."""

    cause: str
    says: str


@dataclass(frozen=True)
class ForeignBlocks:
    """A tensor's blocks, their type, and what a stranger made of them: [block, value]."""

    kind: str
    blocks: Array
    got: Array
    right: Array

    def decoded(self, blocks: Array) -> Array:
        """Any bytes as the type says."""
        with np.errstate(all="ignore"):
            return decode(self.kind, np.ascontiguousarray(blocks)).reshape(len(blocks), -1)

    def head(self, count: int) -> ForeignBlocks:
        """The first of them."""
        return ForeignBlocks(self.kind, self.blocks[:count], self.got[:count], self.right[:count])

    def is_given_by(self, values: Array) -> bool:
        """Whether these are the stranger's values, but for a few blocks."""
        return bool(_alike(self.got[: len(values)], values).mean() >= SHARE)


def _alike(got: Array, values: Array) -> Array:
    """Which blocks are the same: [block]."""
    a, b = got.astype(np.float64), values.astype(np.float64)
    with np.errstate(all="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b)) | (np.isinf(a) & np.isinf(b))
        gap = np.where(same, 0.0, a - b)
        size = np.where(np.isfinite(b), b, 0.0)
        error = np.einsum("ij,ij->i", gap, gap)
        return np.asarray(error <= NEAR * np.einsum("ij,ij->i", size, size))


Way = tuple[Misreading, Decode]
