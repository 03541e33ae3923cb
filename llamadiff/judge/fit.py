"""Which of the arithmetics that were tried a tap's rows fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.judge.compared import Compared
from llamadiff.judge.lanes import Lane, Source
from llamadiff.numerics import metrics, tolerances

Array = NDArray[Any]

EXACT = 1e-13  # NMSE of a row: closer fits say no more
DISTINCT = 10.0  # how many times an exact fit's limit another arithmetic must miss a row by, to be told from it
PARTLY = 0.8  # of float32's error: an arithmetic that leaves less is a part of what the engine does
DIGITS = 3  # decimals of the logarithm of a row's squares: rows that differ less are alike


def nearest(errors: Sequence[Array], sizes: Array, kept: float = 0.0) -> int:
    """The arithmetic that fits the rows best, each row for itself: one wrong row does not outweigh many exact ones.

    ``errors``: of each arithmetic, sums of squares of each row; ``sizes``: the squares of the rows themselves. The
    measure is the mean of logarithms, as for errors that are each of a size of their own. ``kept``: the NMSE that the
    precision leaves in which rows were kept; a closer fit is an accident.
    """
    if not len(sizes) or len(errors) == 1:
        return 0
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = [np.where(error > 0, error / sizes, 0.0) for error in errors]
    scores = [float(np.mean(np.log(np.maximum(np.nan_to_num(r, nan=np.inf), max(EXACT, kept))))) for r in relative]
    return int(np.argmin(scores))


def is_certain(own: Array, others: Sequence[Array], sizes: Array, match: float) -> bool:
    """Whether some row fits one arithmetic exactly and another not at all: then the engine has that one."""
    if not others:
        return False
    apart = np.max(np.stack([np.nan_to_num(error, nan=np.inf) for error in others]), axis=0)
    return bool(((own <= match * sizes) & (apart > DISTINCT * match * sizes)).any())


def count_distinct(sizes: Array) -> int:
    """How many rows differ, by the sums of their squares: tokens that are alike show the same."""
    return len(np.unique(np.log(np.maximum(sizes, np.finfo(np.float64).tiny)).round(DIGITS)))


@dataclass(frozen=True)
class Fitted:
    """How a source's lanes fit one of its taps.

    ``errors``: of each lane, rows' sums of squares; ``sizes``: rows' own squares; ``best``: the lane that fits best, in
    each phase.
    """

    lanes: Sequence[Lane]
    errors: Sequence[Array]
    sizes: Array
    phases: Sequence[slice]
    best: Sequence[Lane]

    @classmethod
    def of(cls, seen: Compared, source: Source, phases: Sequence[slice]) -> Fitted:
        """All lanes of a source that are no measure of noise."""
        lanes = [lane for lane in seen.lanes_of(source) if not lane.is_noise_probe]
        values = [seen.lane(lane, source, ranked=True) for lane in lanes]
        errors = [right.errors(seen.clamp_to_print_precision(source, right)) for right in values]
        sizes = values[0].reference()
        kept = tolerances.ROUNDING[source.shown_in(seen.tap.name)]
        best = [lanes[nearest([error[phase] for error in errors], sizes[phase], kept)] for phase in phases]
        return cls(lanes, errors, sizes, phases, best)

    @property
    def policy(self) -> str:
        """That of the prefill, the last phase."""
        return self.best[-1].policy

    def right(self, seen: Compared, source: Source) -> metrics.Rows:
        """What the best lanes computed."""
        return seen.in_phases(self.best, self.phases, source)

    @property
    def least(self) -> float:
        """The NMSE under the arithmetic that has the smallest error in each phase."""
        total = sum(min(float(error[phase].sum()) for error in self.errors) for phase in self.phases)
        return metrics.ratio(total, float(self.sizes.sum()))

    def missed_policies(self, least: float) -> set[str]:
        """The policies that err by more than this."""
        return {lane.policy for lane, error in zip(self.lanes, self.errors, strict=True) if error.sum() > least}

    def policies(self, match: float) -> tuple[frozenset[str], ...]:
        """Those that fit, in each phase that has rows; where none does, the one that explains a part of the error."""
        return tuple(self._policies(phase, match) for phase in self.phases if len(self.sizes[phase]))

    def _policies(self, phase: slice, match: float) -> frozenset[str]:
        size = float(self.sizes[phase].sum())
        left = {
            lane.policy: metrics.ratio(float(error[phase].sum()), size)
            for lane, error in zip(self.lanes, self.errors, strict=True)
        }
        fitting = frozenset(policy for policy, nmse in left.items() if nmse <= match)
        best = min(left, key=left.__getitem__)
        return fitting or frozenset({best} if left[best] < PARTLY * left[self.lanes[0].policy] else ())

    def typical(self, seen: Compared, source: Source) -> Lane:
        """The lane that most values are nearest to: rows are the fault's, most values tell which arithmetic it was."""
        recorded = seen.values(source.name, source, ranked=True)
        gaps = [_typical_gap(recorded, seen.lane(lane, source, ranked=True)) for lane in self.lanes]
        return self.lanes[int(np.argmin(gaps))]


def _typical_gap(a: metrics.Rows, b: metrics.Rows) -> float:
    """The median distance of two tensors' values."""
    gap = np.abs(a.values - b.values)
    return float(np.median(np.where(np.isnan(gap), np.inf, gap)))
