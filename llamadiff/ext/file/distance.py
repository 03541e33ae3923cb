"""How far two sides of one tensor are apart, and where inside it: streamed in blocks of rows, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.numerics.metrics import ratio

Array = NDArray[Any]
SMALL = 32  # values of a block where the type has none
SHARE = 1e-3  # of the mean size of a block: below, its own size means nothing
TINY = 1e-30


@dataclass(frozen=True)
class Distance:
    """This file's values against the other side's.

    ``nmse`` is sum((a-b)^2) / sum(b^2); ``worst_block``: row, block in it, and its own NMSE. ``place`` says where the
    tensor is off. A value that is not finite on one side alone counts as an error without bounds.
    """

    nmse: float
    cosine: float
    worst_block: tuple[int, int, float]
    not_finite: int = 0
    place: str = ""

    @property
    def snr(self) -> float:
        """In dB."""
        return float("inf") if self.nmse == 0 else float(-10 * np.log10(self.nmse)) if self.nmse > 0 else 0.0


class Meter:
    """Takes blocks of rows of both sides, in order, and adds them up."""

    def __init__(self, block: int, width: int) -> None:
        self.block = block if block > 1 and width % block == 0 else _near(width)
        self.error: list[Array] = []  # [row, block] of each call
        self.size: list[Array] = []
        self.total, self.product, self.squares, self.not_finite = 0.0, 0.0, np.zeros(2), 0

    def add(self, ours: Array, theirs: Array) -> None:
        """Rows of both sides: [row, value]."""
        with np.errstate(over="ignore"):
            self._add(ours, theirs)

    def _add(self, ours: Array, theirs: Array) -> None:
        a, b = ours.astype(np.float64), theirs.astype(np.float64)
        odd = ~(np.isfinite(a) & np.isfinite(b))
        if odd.any():
            same = (a == b) | (np.isnan(a) & np.isnan(b))
            self.not_finite += int((odd & ~same).sum())
            a, b = np.where(odd, np.where(same, 0.0, 1e30), a), np.where(odd, 0.0, b)
        shape = (len(a), -1, self.block)
        gap = (a - b).reshape(shape)
        wide = b.reshape(shape)
        error, size = (np.einsum("rbv,rbv->rb", side, side) for side in (gap, wide))
        self.total += float(error.sum())
        self.error.append(error.astype(np.float32))
        self.size.append(size.astype(np.float32))
        flat = a.reshape(-1), b.reshape(-1)
        self.product += float(flat[0] @ flat[1])
        self.squares += np.array([flat[0] @ flat[0], size.sum()])

    def distance(self) -> Distance:
        """What all calls come to."""
        error, size = np.concatenate(self.error), np.concatenate(self.size)
        own = np.divide(error, np.maximum(size, SHARE * float(size.mean()) + TINY))
        row, block = (int(i) for i in np.unravel_index(int(own.argmax()), own.shape))
        norms = float(np.sqrt(self.squares[0]) * np.sqrt(self.squares[1]))
        cosine = self.product / norms if norms > 0 else float(not error.any())
        nmse = ratio(self.total, float(self.squares[1]))
        return Distance(nmse, cosine, (row, block, float(own[row, block])), not_finite=self.not_finite)

    def off(self, limit: float, share: float = SHARE) -> Array:
        """Which blocks are farther than ``limit`` from the other side: [row, block].

        Errors are set beside the block's size, or ``share`` of the tensor's mean one where that is larger.
        """
        error, size = np.concatenate(self.error), np.concatenate(self.size)
        return np.asarray(error > limit * np.maximum(size, share * float(size.mean())) + TINY)


def _near(width: int) -> int:
    """A block size for rows without blocks."""
    return next((size for size in range(min(SMALL, width), 0, -1) if width % size == 0), 1)


def place_in_words(off: Array, block: int, width: int) -> str:
    """Where blocks are off, [row, block]: all, some rows, some columns, one block."""
    rows, columns = np.flatnonzero(off.any(axis=1)), np.flatnonzero(off.any(axis=0))
    count, per_row = off.shape
    if not len(rows):
        return "nowhere more than elsewhere"
    if off.mean() > 0.9:
        return "everywhere"
    where = [run_in_words(rows, "row", count)]
    if len(columns) < per_row:
        size = f"blocks of {block}"
        where.append(run_in_words(columns, "block", per_row) + f" of each row's {per_row} {size}")
    return ", ".join(where)


def run_in_words(numbers: Sequence[int] | Array, word: str, of: int) -> str:
    """Numbers as a run, or the first few of them."""
    values = [int(i) for i in numbers]
    if len(values) == of:
        return f"all {of} {word}s"
    if len(values) == 1:
        return f"{word} {values[0]}"
    if values[-1] - values[0] == len(values) - 1:
        return f"{word}s {values[0]} to {values[-1]}"
    told = ", ".join(map(str, values[:4])) + (", ..." if len(values) > 4 else "")
    return f"{len(values)} {word}s ({told})"
