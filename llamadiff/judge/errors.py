"""By how much a recorded tap is off what is right: in each row, and at its worst value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from llamadiff.numerics import metrics

Array = NDArray[Any]


@dataclass(frozen=True)
class Errors:
    """``recorded`` against ``right``: rows' sums of squared errors, and their own squares; the largest difference."""

    recorded: metrics.Rows
    right: metrics.Rows
    rows: Array
    sizes: Array
    largest: float
    worst: metrics.Worst

    @classmethod
    def of(cls, recorded: metrics.Rows, right: metrics.Rows) -> Errors:
        return cls(recorded, right, right.errors(recorded), right.reference(), *metrics.worst_of(recorded, right))

    @property
    def nmse(self) -> float:
        return metrics.ratio(float(self.rows.sum()), float(self.sizes.sum()))

    @property
    def per_row(self) -> tuple[float, ...]:
        """The NMSE of each row."""
        return metrics.ratios(self.rows, self.sizes)
