"""What a product of float16's numbers shows of how the candidate adds, where it does not say so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from llamaref.sums import Matrices
from numpy.typing import NDArray

from llamadiff.judge.lanes import Lane
from llamadiff.judge.tap_verdict import Judge
from llamadiff.numerics import half_sums, metrics, tolerances
from llamadiff.numerics.policies import rounding_type
from llamadiff.trace.taps import Tap

Array = NDArray[Any]


@dataclass(frozen=True)
class _Added:
    """A product of float16's numbers in a lane: its shape, and what it consists of."""

    number: int
    shape: tuple[int, ...]
    kernel: half_sums.Kernel
    parts: Matrices


class ShownSums:
    """Keeps the last product in mind until its tap is seen: then ``Judge.ways`` are those that all taps allow."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._last: _Added | None = None

    def added(
        self, lanes: Sequence[Lane], kind: str, shape: tuple[int, ...], kernel: half_sums.Kernel, parts: Matrices
    ) -> None:
        """A product was added in float32."""
        self._last, candidate = None, self._judge.sources.get("candidate")
        if candidate is None or "sums" in candidate.stored:
            return
        for number, lane in enumerate(lanes):
            if lane.source == candidate.name and rounding_type(lane.policy, kind, candidate.stored) == "F16":
                self._last = _Added(number, shape, kernel, parts)

    def note(self, tap: Tap, x: Array, lanes: Sequence[Lane], recorded: Mapping[str, Array]) -> None:
        """A tap, ``x`` [lane, ...], that is perhaps the last product: how that was added, if not as float32 is."""
        added, self._last = self._last, None
        if added is None or not self._judge.sources["candidate"].is_whole(tap.name):
            return
        found, rows = recorded["candidate"], half_sums.some(x.shape[1], half_sums.ROWS)
        limit = tolerances.rule_for(self._judge.rules, tap.name, "MUL_MAT", "F16").match
        own = (values for lane, values in zip(lanes, x, strict=True) if lane.source == "candidate")
        if any(metrics.nmse(found[rows], values[rows], 0) <= limit for values in own):
            return
        with suppress(ValueError, IndexError):  # the tap is not the product itself, but a part of it perhaps
            ways = added.kernel.shown(found.reshape(added.shape), added.parts(added.number))
            self._judge.ways = ((self._judge.ways & ways) or self._judge.ways) or ways
