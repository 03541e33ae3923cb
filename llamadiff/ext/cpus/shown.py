"""Which way of adding float16's numbers a candidate's taps show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from llamaref.sums import Matrices
from numpy.typing import NDArray

from llamadiff.ext.cpus.half_sums import ROWS, WAYS, Kernel, kernel, some
from llamadiff.judge.finding import Finding
from llamadiff.judge.lanes import Lane
from llamadiff.judge.measuring import Judge
from llamadiff.judge.settings import settings_of
from llamadiff.judge.study import Bench, Study
from llamadiff.numerics import metrics, summing, tolerances
from llamadiff.numerics.cpu import UNKNOWN
from llamadiff.numerics.policies import rounding_type
from llamadiff.trace.reader import Trace
from llamadiff.trace.taps import Tap

Array = NDArray[Any]


@dataclass(frozen=True)
class _Added:
    """A product of float16's numbers in a lane: its shape, and what it consists of."""

    number: int
    shape: tuple[int, ...]
    kernel: summing.Kernel
    parts: Matrices


class ShownSums:
    """Keeps the last product in mind until its tap is seen, which may show how it was added."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._last: _Added | None = None

    def record_sum(
        self, lanes: Sequence[Lane], kind: str, shape: tuple[int, ...], kernel: summing.Kernel, parts: Matrices
    ) -> None:
        """A product was added in float32."""
        self._last, candidate = None, self._judge.sources.get("candidate")
        if candidate is None or candidate.stored.get("sums", UNKNOWN) != UNKNOWN:
            return
        for number, lane in enumerate(lanes):
            if lane.source == candidate.name and rounding_type(lane.policy, kind, candidate.stored) == "F16":
                self._last = _Added(number, shape, kernel, parts)

    def orders_shown(self, tap: Tap, x: Array, lanes: Sequence[Lane], recorded: Mapping[str, Array]) -> frozenset[str]:
        """The ways in which the last product may have been added, if a tap, ``x`` [lane, ...], is that product, and was
        not added as float32 is.
        """
        added, self._last = self._last, None
        if added is None or not self._judge.sources["candidate"].is_whole(tap.name):
            return frozenset()
        found, rows = recorded["candidate"], some(x.shape[1], ROWS)
        limit = tolerances.rule_for(self._judge.rules, tap.name, "MUL_MAT", "F16").match
        own = (values for lane, values in zip(lanes, x, strict=True) if lane.source == "candidate")
        if any(metrics.nmse(found[rows], values[rows], 0) <= limit for values in own):
            return frozenset()
        with suppress(ValueError, IndexError):  # the tap is not the product itself, but a part of it perhaps
            return frozenset(added.kernel.orders_shown(found.reshape(added.shape), added.parts(added.number)))
        return frozenset()


def sums(bench: Bench, study: Study) -> Study | None:
    """Sums of float16's numbers in it, as some product shows."""
    way = "" if study.assumed.sums else sums_shown(study.passes.findings)
    assumed = study.assumed
    if not way or assumed.trace is None:
        return None
    return bench.run(replace(assumed, sums=way, trace=with_sums(assumed.trace, way)))


def sums_shown(findings: Sequence[Finding]) -> str:
    """The way to add float16's numbers in it that most of the candidate's taps allow, the likelier first; "": none."""
    counts = Counter(way for finding in findings for way in finding.sums)
    return max(counts, key=lambda way: (counts[way], -WAYS.index(way)), default="")


def with_sums(trace: Trace, sums: str) -> Trace:
    """A trace whose producer says that it keeps sums of float16's numbers in it, in one of WAYS."""
    producer = trace.info.producer
    settings = {**settings_of(trace), "sums": sums}
    return trace.under(replace(trace.info, producer={**producer, "settings": settings}))


class HalfSums:
    """The ways to add float16's numbers in it, for the judge."""

    ways = WAYS

    def kernel(self, sums: str, kind: str, edges: Sequence[int], start: int, by_row: bool) -> Kernel:
        """What adds products of a kind of operands."""
        return kernel(sums, kind, edges, start, by_row)
