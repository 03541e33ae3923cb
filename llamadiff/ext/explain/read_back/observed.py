"""An op as it was observed: what it read, what it gave, what is right. Arrays in float64, of the tap's own shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.ext.explain.case import Case, NotRecordedError, row_errors
from llamadiff.ext.explain.part import Part, wrong_rows
from llamadiff.ext.explain.pattern.deviation import ODD, SAME
from llamadiff.ext.explain.subgraph import subgraph_of
from llamadiff.judge.fact import Fact
from llamadiff.numerics.arithmetic import ROUNDINGS
from llamadiff.trace import taps

Array = NDArray[Any]
Facts = Iterator[Fact]
Readings = Iterator[tuple[Any, Fact]]  # what would have been recorded, and what is said if it was
LARGEST = 1 << 24  # values of a tap that are looked at
APART = 0.3  # of an error, that values may be apart which are solved for, and those that a reading gives
LEFT = 1e-3  # of an error, that what explains it may leave
CLEARLY = 0.5  # of the distance to float32, that an arithmetic leaves which is the engine's
NOTHING = 1e-6  # of an error, that float32 may


@dataclass(frozen=True)
class Observed:
    """One case, its recorded and its right values.

    ``shown``: of a tap that was not recorded but solved for, what values in its place leave of the error of what was.
    ``part``: the rows that these are, where not all are looked at.
    """

    case: Case
    recorded: Array
    expected: Array
    shown: Callable[[Array], float] | None = None
    part: Part | None = None

    @classmethod
    def of(cls, case: Case, in_graph: Case, shown: Callable[[Array], float] | None = None) -> Observed | None:
        """What can be read back from; None where values are missing, not finite or too many, or none is wrong.

        Raises NotRecordedError where an input is missing, or there is no graph.
        """
        if case.recorded is None or case.tap.name in case.run.known or case.recorded.size > LARGEST:
            return None
        recorded = np.asarray(case.recorded, np.float64)
        computed = np.asarray(subgraph_of(in_graph).compute(in_graph), np.float64).reshape(-1, *recorded.shape)
        gaps = [float(np.median(np.abs(recorded - entry))) for entry in computed]
        nearest = int(np.argmin(gaps))  # most values are right, or nearest, under the engine's arithmetic
        expected = computed[nearest if gaps[nearest] < CLEARLY * gaps[0] else 0]
        if case.tap.causal:
            seen = case.run.positions[None, :] <= case.run.positions[:, None]
            recorded, expected = np.where(seen, recorded, 0.0), np.where(seen, expected, 0.0)
        if not (np.isfinite(recorded).all() and np.isfinite(expected).all()):
            return None
        found = cls(case, recorded, expected, shown)
        return found if found.is_bad.any() else None

    def wrong_part(self) -> Observed | None:
        """The rows that are wrong, where others are right."""
        axis = self.case.tap.row_axis
        wrong = wrong_rows(*row_errors(self.expected, self.recorded, axis), self.case.limit)
        part = Part.of(wrong, self.case.run.n_prefill) if self.shown is None else None
        if part is None:
            return None
        recorded, expected = (np.take(side, part.rows, axis) for side in (self.recorded, self.expected))
        return Observed(self.case, recorded, expected, part=part)

    @property
    def rows(self) -> Array:
        """Which rows of the run these are."""
        count = len(self.case.run.tokens)
        return np.arange(count) if self.part is None else np.array(self.part.rows)

    @property
    def positions(self) -> Array:
        """Of its rows."""
        return np.asarray(self.case.run.positions[self.rows])

    def values(self, name: str) -> Array:
        """What was recorded of another tap, in these rows. Raises NotRecordedError."""
        x, tap = np.asarray(self.case.values(name)[0]), taps.parse(name)
        if self.part is None:
            return x
        axis = tap.row_axis if tap is not None else 0
        if x.shape[axis] != len(self.case.run.tokens):
            raise NotRecordedError(name)
        return np.take(x, self.part.rows, axis)

    @property
    def raw(self) -> Array:
        """What was recorded of the tap, of what is hidden as well."""
        assert self.case.recorded is not None
        x = np.asarray(self.case.recorded, np.float64)
        return x if self.part is None else np.take(x, self.part.rows, self.case.tap.row_axis)

    def shape(self, number: int = 0) -> tuple[int, ...]:
        """That of an input, as its tap has it."""
        return self.values(self.input_names()[number]).shape

    def input(self, number: int = 0, shape: Sequence[int] | None = None) -> Array:
        """What the op read, as the tap or as ``shape`` has it; integers stay such.

        Raises NotRecordedError where it read a part of what was recorded: K of a fused product.
        """
        name, wanted = self.input_names()[number], self.recorded.shape if shape is None else tuple(shape)
        x = self.values(name)
        if -1 not in wanted and x.size != math.prod(wanted):
            raise NotRecordedError(name)
        return (x if x.dtype.kind == "i" else np.asarray(x, np.float64)).reshape(wanted)

    def input_names(self) -> list[str]:
        """The taps that the op read; of a graph's nodes without a name of their own, what the first of these read."""
        model = self.case.run.model
        names, inner = model.inputs(self.case.tap), {tap.name: tap for tap in model.taps if "(" in tap.name}
        while len(names) == 1 and names[0] in inner and inner[names[0]].kind.optional:
            names = model.inputs(inner[names[0]])
        return names

    @cached_property
    def error(self) -> Array:
        """What is recorded less what is right."""
        return self.recorded - self.expected

    @cached_property
    def is_bad(self) -> Array:
        """Which values are wrong: their error is out of proportion to the tensor's size."""
        size = float(np.mean(np.square(self.expected))) or 1.0
        return np.asarray(np.square(self.error) > max(100 * self.case.limit, 1e-12) * size)

    def left(self, values: Array) -> float:
        """What of the error is left if the recorded values should be these; all of it where a value is far off."""
        values = values.reshape(self.recorded.shape)
        if self.shown is not None:
            left = self.shown(values) if self._is_near(values) else 1.0
            return left if np.isfinite(left) else 1.0
        rest, error = np.square(self.recorded - values), np.square(self.error)
        near = np.isfinite(rest).all() and rest.max() <= ODD**2 * error.mean()
        return float(rest.sum() / error.sum()) if near else 1.0

    def _is_near(self, values: Array) -> bool:
        """Whether values are near those that were solved for, in most rows: in some, that may have found others."""
        axis = self.case.tap.row_axis
        rest, _ = row_errors(values, self.recorded, axis)
        error, size = row_errors(self.expected, self.recorded, axis)
        wrong = error > NOTHING * size
        return bool(np.median((rest / np.maximum(error, 1e-300))[wrong]) <= APART) if wrong.any() else False

    def is_right(self, values: Array, left: float = SAME / 100) -> bool:
        """Whether these are the right values: an op is laid open as it should be."""
        gap = values.reshape(self.expected.shape) - self.expected
        return bool(np.square(gap).sum() <= left * np.square(self.expected).sum())

    def fits(self, values: Array, left: float = LEFT) -> bool:
        """Whether the recorded values are these: no more of the error is ``left``."""
        return self.left(values) <= left


def first_told(readings: Iterable[Callable[..., Facts]], *of: Any) -> Facts:
    """What the first of some readings says that says anything."""
    yield from next((facts for reading in readings if (facts := tuple(reading(*of)))), ())


def first_fit(fits: Callable[[Any], bool], *readings: Readings) -> Facts:
    """What is said of the first values that fit; of None, what holds whatever was recorded."""
    for values, fact in chain.from_iterable(readings):
        if values is None or fits(values):
            yield fact
            return


def factor_of(x: Array, y: Array, axis: int | None = None) -> Array:
    """By what x comes nearest to y, along an axis or all: least squares."""
    return np.asarray((x * y).sum(axis=axis) / np.maximum(np.square(x).sum(axis=axis), 1e-300))


def _through(rounded: Callable[[Array], Array], x: Array) -> Array:
    return np.asarray(rounded(x.astype(np.float32)), np.float64)


IN_16_BITS = {"float16": partial(_through, ROUNDINGS["F16"]), "bfloat16": partial(_through, ROUNDINGS["BF16"])}


def nearest_range(sums: Array, wanted: Array, starts: Array, divided_by: Array | float = 1.0) -> tuple[int, int]:
    """Where the range begins and ends whose sums come nearest to those wanted, of running sums [sample, place]."""
    places, gaps = np.arange(sums.shape[1]), np.zeros((len(starts), sums.shape[1]))
    for row, target in zip(sums, wanted, strict=True):
        gaps += np.square((row[None] - row[starts, None]) / divided_by / target - 1)
    gaps[places[None] <= starts[:, None]] = np.inf
    start, stop = np.unravel_index(int(gaps.argmin()), gaps.shape)
    return int(starts[start]), int(stop)


def strictly(left: float) -> float:
    """What a reading may leave that explains what a freer one does, which left so much: hardly more."""
    return min(max(10 * left, NOTHING), LEFT)


def sole(values: Array, near: float) -> float | None:
    """The one number that all values are, within ``near`` of it; None if they differ."""
    middle = float(np.median(values)) if values.size else 0.0
    return middle if values.size and float(np.abs(values - middle).max()) <= near else None


def only_run(flags: Any) -> tuple[int, int] | None:
    """The first and the last of the flags that are set, if these are neighbours and not all; else None."""
    there = np.flatnonzero(flags)
    if not 0 < len(there) < len(flags) or there[-1] - there[0] != len(there) - 1:
        return None
    return int(there[0]), int(there[-1])
