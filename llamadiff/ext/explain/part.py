"""The rows that are wrong where others are right: decode steps, a batch, some tokens; and the words for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.ext.explain.pattern.deviation import numbered

Array = NDArray[Any]
TINY = 1e-9  # what float32 leaves of a right row
FEWEST = 16  # values of wrong rows: fewer fit by chance
MOST = 8  # rows that are named one by one


@dataclass(frozen=True)
class Part:
    """Rows of a run, by token, and where they are, in words that follow a sentence."""

    rows: tuple[int, ...]
    words: str

    @classmethod
    def of(cls, is_wrong: Array, n_prefill: int) -> Part | None:
        """The rows that are wrong, by row; None where none or all are, or they are strewn."""
        wrong = [int(row) for row in np.flatnonzero(is_wrong)]
        words = _words(wrong, n_prefill, len(is_wrong)) if 0 < len(wrong) < len(is_wrong) else ""
        return cls(tuple(wrong), words) if words else None

    def has_all(self, is_wrong: Array) -> bool:
        """Whether no other rows are wrong."""
        return set(np.flatnonzero(is_wrong)) <= set(self.rows)

    def alone(self, x: Array, axis: int) -> Array:
        """Values of these rows, and zero elsewhere."""
        there = np.isin(np.arange(x.shape[axis]), self.rows)
        return np.where(there.reshape([-1 if at == axis else 1 for at in range(x.ndim)]), x, x.dtype.type(0))


def wrong_rows(errors: Array, sizes: Array, limit: float) -> Array:
    """Which rows are off by more than an NMSE, by sums of squares."""
    return np.asarray(errors > max(limit, TINY) * sizes)


def _words(rows: list[int], n_prefill: int, count: int) -> str:
    if rows == list(range(n_prefill, count)):
        return "in decode steps alone"
    if rows == list(range(rows[0], count)):
        return f"from token {rows[0]} on alone"
    if len(rows) <= MOST or rows == list(range(rows[0], rows[-1] + 1)):
        return f"for token{'s' if len(rows) > 1 else ''} {numbered(rows)} alone"
    return ""
