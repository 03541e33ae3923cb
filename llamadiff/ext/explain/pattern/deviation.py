"""A tap's recorded values beside the right ones: what facts about an error are drawn from. Arrays in float64."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from llamaref.config import Rope
from numpy.typing import NDArray

from llamadiff.judge.fact import Fact, runs_of
from llamadiff.trace.taps import BY_WORD, Tap

Array = NDArray[Any]

SAME = 1e-4  # NMSE below which two tensors are taken for one (drift before the op leaves about this much)
LEFT = 0.01  # of an error, that what explains it may leave
ODD = 0.5  # of an error's rms, that it may leave of one value
MERGED = ("head*dim", "kv_head*dim")
SHOWN = 5  # numbers, or runs of them, that a fact lists
PART_WORDS = {"used": "chosen expert"}  # what an axis runs over, where its name is no noun


@dataclass(frozen=True)
class Deviation:
    """One tap's error: ``recorded`` and ``expected`` [row, ...]; ``limit``: the NMSE that rounding explains.

    ``others`` are tensors that the values may be instead, by what they are called; ``inputs`` what the op read, by tap;
    ``rope`` and ``positions`` those of a RoPE tap; ``dim``: the size of a head.
    """

    tap: Tap
    recorded: Array
    expected: Array
    limit: float
    others: Mapping[str, Array] = field(default_factory=dict)
    inputs: Mapping[str, Array] = field(default_factory=dict)
    rope: Rope | None = None
    positions: Sequence[int] = ()
    dim: int | None = None

    @cached_property
    def axes(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """The tap's axes and their sizes; merged heads apart."""
        names, shape = self.tap.kind.axes, self.recorded.shape
        if self.dim and len(shape) == 2 and names[-1] in MERGED and shape[-1] % self.dim == 0:
            return (*names[:-1], *names[-1].split("*")), (shape[0], shape[1] // self.dim, self.dim)
        return names, shape

    @cached_property
    def part(self) -> str:
        """What one entry of the axis after the rows is: a head, an expert; a channel where that is the last."""
        own, known = self.tap.kind.axes, BY_WORD.get(self.tap.kind.word)
        axes = known.axes if known is not None and len(known.axes) == len(own) else own  # a graph's are numbers
        names = [name for i, name in enumerate(axes) if i != self.tap.row_axis]
        if len(names) < 2:
            return "channel"
        return PART_WORDS.get(names[0], "part" if names[0].isdecimal() else names[0].split("_")[-1])

    @property
    def has_gaps(self) -> bool:
        """Whether tokens between these were not looked at."""
        return any(after - before > 1 for before, after in pairwise(self.positions))

    @cached_property
    def finite(self) -> bool:
        """Whether all of both sides is."""
        return bool(np.isfinite(self.recorded).all() and np.isfinite(self.expected).all())

    @cached_property
    def error(self) -> Array:
        """Squared, of each value; infinite where it is not finite."""
        error = np.square(self.recorded - self.expected)
        return np.where(np.isfinite(error), error, np.inf)

    @cached_property
    def bad(self) -> Array:
        """Which values are wrong: their error is out of proportion to the tensor's size."""
        size = float(np.mean(np.square(self.expected))) or 1.0
        return np.asarray(self.error > max(100 * self.limit, 1e-12) * size)

    @cached_property
    def bad_rows(self) -> Array:
        """Which rows hold a wrong value."""
        return np.asarray(self.bad.reshape(len(self.bad), -1).any(axis=1))

    def explained_by(self, values: Array, may_leave: float = LEFT) -> bool:
        """Whether the recorded values are these rather than the right ones: of the error next to nothing is left."""
        if not self.finite:
            return False
        rest = np.square(self.recorded - values)
        left, error, n = float(rest.sum()), float(self.error.sum()), rest.size
        size = min(float(np.square(x).sum()) for x in (self.expected, values))
        return left <= may_leave * error and left <= SAME * size and float(rest.max()) <= ODD**2 * error / n


def finite_facts(facts: Iterable[Fact]) -> tuple[Fact, ...]:
    """Those whose values are numbers: what is not finite says nothing."""
    return tuple(f for f in facts if all(math.isfinite(v) for v in f.values if isinstance(v, float)))


def factor(value: float) -> str:
    """A factor with four digits, or with four of what it differs from one by."""
    places = 3 - math.floor(math.log10(abs(value - 1))) if 0 < abs(value - 1) < 0.1 else 0
    return f"{value:.{places}f}".rstrip("0") if places else f"{value:.4g}"


def numbered(numbers: Iterable[int]) -> str:
    """Ascending numbers, runs of them as such: ``0, 3 to 7 and 9``; of many the first ones, and how many more."""
    runs = runs_of(numbers)
    shown = [f"{run[0]} to {run[-1]}" if len(run) > 2 else " and ".join(map(str, run)) for run in runs[:SHOWN]]
    more = sum(map(len, runs[SHOWN:]))
    if more:
        return f"{', '.join(shown)} and {more} more"
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def counted(word: str, numbers: Collection[int]) -> str:
    """What is numbered, and the numbers: ``token 3``, ``tokens 3 and 5 to 7``."""
    return f"{word}{'s' if len(numbers) > 1 else ''} {numbered(numbers)}"


def are(numbers: Collection[int]) -> str:
    """The verb that follows that."""
    return "are" if len(numbers) > 1 else "is"


def listed(numbers: Sequence[object]) -> str:
    """The first of some values in their order, and how many more."""
    more = f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
    return ", ".join(map(str, numbers[:SHOWN])) + more
