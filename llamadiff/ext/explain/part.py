"""The rows that are wrong where others are right: decode steps, a batch, some tokens; and the words for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.ext.explain.pattern.deviation import numbered

Array = NDArray[Any]
RIGHT = 1e-2  # of the error a row of it, in the mean, that a right one may have
FEWEST = 16  # values of wrong rows: fewer fit by chance
MOST = 8  # rows that are named one by one


@dataclass(frozen=True)
class Part:
    """Rows of a run, by token, and where they are, in words that follow a sentence."""

    rows: tuple[int, ...]
    words: str

    @classmethod
    def of(cls, errors: Array, n_prefill: int) -> Part | None:
        """The rows that make all of an error, by their sums of squares; None where all do, or they are strewn."""
        total, wrong = float(errors.sum()), np.flatnonzero(errors > 0)
        if not (np.isfinite(total) and len(wrong)):
            return None
        wrong = np.flatnonzero(errors > RIGHT * total / len(errors))
        if len(wrong) == len(errors) or errors[wrong].sum() < (1 - RIGHT) * total:
            return None
        words = _words([int(row) for row in wrong], n_prefill, len(errors))
        return cls(tuple(map(int, wrong)), words) if words else None

    def is_in(self, errors: Array) -> bool:
        """Whether an error is of no other rows."""
        total, inside = float(errors.sum()), float(errors[list(self.rows)].sum())
        return bool(np.isfinite(total)) and inside >= (1 - RIGHT) * total

    def alone(self, x: Array, axis: int) -> Array:
        """Values of these rows, and zero elsewhere."""
        there = np.isin(np.arange(x.shape[axis]), self.rows)
        return np.where(there.reshape([-1 if at == axis else 1 for at in range(x.ndim)]), x, x.dtype.type(0))


def _words(rows: list[int], n_prefill: int, count: int) -> str:
    if rows == list(range(n_prefill, count)):
        return "in decode steps alone"
    if rows == list(range(rows[0], count)):
        return f"from token {rows[0]} on alone"
    if len(rows) <= MOST or rows == list(range(rows[0], rows[-1] + 1)):
        return f"for token{'s' if len(rows) > 1 else ''} {numbered(rows)} alone"
    return ""
