"""The study of one forward pass: the tap that carries the lanes through the engine and has every one judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from llamaref import ops
from llamaref.config import Rope
from numpy.typing import NDArray

from llamadiff import taps
from llamadiff.carrier import Carrier
from llamadiff.errors import UserError
from llamadiff.judging import Finding, Judge
from llamadiff.lanes import FREE, FREE_NATIVE, JITTER, NATIVE, Lane, Source, policies_for, shaken

Array = NDArray[Any]
# the ops in which a token's row depends on other tokens' rows
MIXING = ("kq", "kq_soft_max", "kqv", "kqv_out", "ssm_conv", "ssm_scan")


class Study(Carrier):
    """A llamaref.Tap: holds the lanes and collects a Finding for every tap."""

    def __init__(
        self,
        judge: Judge,
        present: Sequence[taps.Tap],
        inputs: Callable[[taps.Tap], list[str]],
        n_expert: int,
        keep: Callable[[str, Array], None] = lambda name, x: None,
    ) -> None:
        """``inputs`` gives the taps that one is computed from; ``keep(name, x)`` receives the free run's taps."""
        self.judge, self.sources, self.lanes = judge, judge.sources, judge.lanes
        super().__init__([(lane.policy, self._stored(lane)) for lane in self.lanes])
        self.present = {tap.name: tap for tap in present}
        self.inputs, self.n_expert = inputs, n_expert
        self.keep = keep
        self.findings: list[Finding] = []
        self.free_logits: Array | None = None

    def __call__(self, name: str, x: Array) -> Array:
        tap = self.present.get(name)
        if tap is None:
            raise UserError(f"the engine has a tap {name} that the vocabulary does not list")
        if x.shape[0] != len(self.lanes):  # the embedding: one run becomes a run a lane
            x = np.broadcast_to(x, (len(self.lanes), *x.shape[1:]))
        x = x.copy()
        self.keep(name, x[0])
        if name == "result_output":
            self.free_logits = x[0].copy()
        spans = {source.name: self._opened(source, tap) for source in self.sources.values()}
        recorded = {
            source.name: self._recorded(source, tap, x.shape[1:])
            for source in self.sources.values()
            if name in source.trace
        }
        self.findings.append(self.judge.finding(tap, x, recorded, spans))
        for number, lane in enumerate(self.lanes):
            if lane.source is not None and lane.source in recorded:
                values = recorded[lane.source]
                rows = self.sources[lane.source].whole_rows(name)
                values = shaken(values) if lane.policy == JITTER else values
                x[number] = values if rows is None else np.where(_along_first(rows, values), values, x[number])
        return x

    def angles(
        self, cos: Array, sin: Array, rope: Rope, positions: Array, factors: Array | None
    ) -> tuple[Array, Array]:
        self.judge.mean_square_angle[rope] = float(np.mean(ops.rope_theta(rope, positions, factors) ** 2))
        return super().angles(cos, sin, rope, positions, factors)

    def _stored(self, lane: Lane) -> Mapping[str, str]:
        return {} if lane == FREE else self.sources[lane.source or "baseline"].stored

    def _opened(self, source: Source, tap: taps.Tap) -> tuple[str, ...]:
        """The unrecorded taps that lie between this one and the recorded ones before it."""
        inputs = self.inputs(tap)
        wanted = None if tap.kind.word in MIXING else source.whole_rows(tap.name)
        open_ones = [i for i in inputs if not _has_rows(source, i, wanted)]
        opened = tuple(dict.fromkeys(name for i in open_ones for name in source.spans.get(i, ())))
        if not source.is_whole(tap.name):
            source.spans[tap.name] = opened if tap.kind.optional else (*opened, tap.name)
        return opened

    def _recorded(self, source: Source, tap: taps.Tap, shape: tuple[int, ...]) -> Array:
        """The trace's values in the engine's shape."""
        values = source.trace[tap.name]
        same_rows = values.ndim > tap.row_axis and values.shape[: tap.row_axis + 1] == shape[: tap.row_axis + 1]
        if not same_rows or values.size != int(np.prod(shape)):
            raise UserError(
                f"{tap.name} of the {source.name} has shape {list(values.shape)}; this model and these tokens need "
                f"{list(shape)} ({', '.join(tap.kind.axes)})"
            )
        if tap.kind.op == "ARGSORT":
            return self._expert_numbers(source, tap, values).reshape(shape)
        return values.reshape(shape)

    def _expert_numbers(self, source: Source, tap: taps.Tap, values: Array) -> Array:
        """Expert numbers as an index array. Raises UserError for a number that is no expert's."""
        with np.errstate(invalid="ignore"):
            numbers = np.asarray(values).astype(np.int32)
        bad = (numbers != values) | (numbers < 0) | (numbers >= self.n_expert)
        if bad.any():
            found = np.asarray(values)[bad].flat[0]
            raise UserError(
                f"{tap.name} of the {source.name}: {found} is no expert's number (0 to {self.n_expert - 1})"
            )
        return numbers


def lanes_of(sources: Sequence[Source], weight_types: set[str]) -> list[Lane]:
    """The free run, the same with the baseline's arithmetic if that differs, and every source's lanes."""
    native = NATIVE in policies_for(weight_types, sources[0].stored, (FREE.policy, NATIVE))
    return [FREE, *([FREE_NATIVE] if native else []), *(lane for source in sources for lane in source.lanes)]


def _along_first(rows: Array, values: Array) -> Array:
    """Flags of rows, to be broadcast against a tap whose first axis runs over tokens."""
    return rows.reshape(-1, *[1] * (values.ndim - 1))


def _has_rows(source: Source, name: str, wanted: Array | None) -> bool:
    """Whether a partial tap has all the rows that a partial tap after it needs."""
    rows = source.whole_rows(name)
    return rows is not None and wanted is not None and bool((rows | ~wanted).all())
