"""A product seen through a few random combinations of its rows, and of its channels (Freivalds 1977).

Whether Y = X W^T can be seen without the product: of normal numbers G, each row of G Y - (G X) W^T has the mean square
of the error's columns, whatever the error is, and each column of Y H - X (W^T H) that of its rows. G X has few rows, so
that this costs little more than reading W. docs/verifying.md derives how seldom an error passes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.judge.coverage import COUNT, SEED, SPAN
from llamadiff.system.pages import in_parts

Array = NDArray[Any]


def seldom(share: float) -> float:
    """How seldom COUNT combinations show so small a share of an error's square, at most.

    Chernoff's bound for the mean of COUNT squares of normal numbers. That of the squares of vectors, |G E|^2, is no
    larger: the moments of sum(w g^2) with sum(w) = 1 are those of one g^2 where one w is 1.
    """
    return float((share * np.exp(1 - share)) ** (COUNT / 2)) if share < 1 else 1.0


@dataclass(frozen=True)
class Combinations:
    """Those of so many rows, none of which reaches over the border of two ``spans``."""

    spans: tuple[slice, ...]
    _of_channels: dict[int, Array] = field(default_factory=dict)

    @classmethod
    def within(cls, phases: Iterable[slice], n: int) -> Combinations:
        """Of ``n`` rows in phases, each cut into spans; in the order of the rows."""
        cut = [range(*phase.indices(n)) for phase in phases]
        starts = sorted((start, rows.stop) for rows in cut for start in rows[::SPAN])
        return cls(tuple(slice(start, min(start + SPAN, stop)) for start, stop in starts))

    @cached_property
    def of_rows(self) -> tuple[Array, ...]:
        """The numbers of each span: [COUNT, row]."""
        drawn = np.random.default_rng([SEED, 0])
        return tuple(drawn.standard_normal((COUNT, span.stop - span.start)).astype(np.float32) for span in self.spans)

    @cached_property
    def of_ones(self) -> Array:
        """What the combinations make of a constant: [span, COUNT, 1]."""
        return np.stack([numbers.sum(axis=1, dtype=np.float64)[:, None] for numbers in self.of_rows])

    def of_channels(self, width: int) -> Array:
        """[channel, COUNT]."""
        if width not in self._of_channels:
            drawn = np.random.default_rng([SEED, 1, width])
            self._of_channels[width] = drawn.standard_normal((width, COUNT)).astype(np.float32)
        return self._of_channels[width]

    def rows(self, x: Array) -> Array:
        """Rows combined: [..., row, value] -> [..., span, COUNT, value]."""
        parts = [_combined(numbers.astype(x.dtype, copy=False), x[..., span, :])
                 for numbers, span in zip(self.of_rows, self.spans, strict=True)]  # fmt: skip
        return np.stack(parts, axis=-3)

    def channels(self, x: Array) -> Array:
        """Channels combined: [..., row, channel] -> [..., row, COUNT]."""
        return by_numbers(x, self.of_channels(x.shape[-1]))


def by_numbers(x: Array, numbers: Array) -> Array:
    """x [..., channel] @ numbers [channel, COUNT]."""
    numbers = numbers.astype(x.dtype, copy=False)
    return np.concatenate([x[rows] @ numbers for rows in in_parts(x)])


def _combined(numbers: Array, x: Array) -> Array:
    """numbers [COUNT, row] @ x [..., row, value]."""
    if x.ndim > 2:
        return np.stack([_combined(numbers, each) for each in x])
    return np.asarray(sum(numbers[:, rows] @ x[rows] for rows in in_parts(x)))


@dataclass(frozen=True)
class ErrorSquares:
    """The squares of a product's error: of each span's ``channels`` [span, channel], and of ``rows`` [row]."""

    channels: Array
    rows: Array

    @classmethod
    def of(cls, rows: Array, channels: Array) -> ErrorSquares:
        """From the differences of combined rows [span, COUNT, channel], and of combined channels [row, COUNT]."""
        return cls(_mean_squares(rows, 1), _mean_squares(channels, 1))


def _mean_squares(gaps: Array, axis: int) -> Array:
    """Not finite where anything is not."""
    return np.asarray(np.square(gaps, dtype=np.float64).mean(axis=axis))
