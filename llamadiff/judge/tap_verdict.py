"""The judge: one tap's lanes against what the traces recorded, and what of the difference is rounding."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from llamaref.config import Rope
from numpy.typing import NDArray

from llamadiff.judge import fit
from llamadiff.judge.allowance import Allowance
from llamadiff.judge.compared import Compared
from llamadiff.judge.finding import Finding, Local, Tried
from llamadiff.judge.finiteness import qualified
from llamadiff.judge.lanes import FREE, FREE_NATIVE, Lane, Source
from llamadiff.judge.noise import SHAKEN, Shown, TapNoise
from llamadiff.judge.pattern.deviation import Deviation, Fact
from llamadiff.judge.pattern.facts import profile
from llamadiff.judge.statistics import held
from llamadiff.numerics import arithmetic, metrics, tolerances
from llamadiff.numerics.policies import CACHE_V, operand_kind, rounding_type
from llamadiff.trace import taps

Array = NDArray[Any]
DESCRIBED = 3  # wrong taps of a kind whose errors are described
MOST = 200  # look-alikes that are compared
APART = 10.0  # an arithmetic that misses a product by so many times as much as another is not the engine's


@dataclass
class Judge:
    """The facts of one run that every tap is judged by.

    ``weight_types``: tap name -> type of the weight it multiplies by; ``edges``: where batches begin and end;
    ``ropes`` of the layers, and ``mean_square_angle`` of each of them, radians; ``sizes`` of axes.
    ``described``: how many errors of a kind have facts already;
    ``shown``: by source, what right taps have shown of its arithmetic.
    """

    sources: Mapping[str, Source]
    weight_types: Mapping[str, str]
    rules: Sequence[tolerances.Rule]
    positions: Array
    n_prefill: int
    ropes: Sequence[Rope | None]
    sizes: Mapping[str, int]
    edges: tuple[int, ...]
    mean_square_angle: dict[Rope, float] = field(default_factory=dict)
    described: Counter[tuple[str, str]] = field(default_factory=Counter)
    shown: dict[str, Shown] = field(default_factory=dict)

    def finding(
        self,
        tap: taps.Tap,
        x: Array,
        lanes: Sequence[Lane],
        recorded: Mapping[str, Array],
        spans: Mapping[str, tuple[str, ...]],
    ) -> Finding:
        """Judge one tap: ``x`` [lane, ...] computed, ``recorded`` and ``spans`` by source."""
        seen = Compared(tap, x, lanes, recorded, self.sources, self.positions)
        replayed = {lane.source for lane in lanes}
        judged = {name: self._local(self.sources[name], seen, spans[name]) for name in recorded if name in replayed}
        local = {name: self._qualified(self.sources[name], seen, found) for name, (found, _) in judged.items()}
        free = seen.lane(FREE) if FREE in lanes else None
        return Finding(
            tap=tap,
            shape=tuple(x.shape[1:]),
            local=local,
            at={name: seen.at(found.index) for name, found in local.items()},
            stats={name: seen.stats(name) for name in recorded} | ({"engine": metrics.stats(free)} if free else {}),
            drift=self._drift(seen),
            distance={name: seen.distance(name) for name in recorded} if free else {},
            noise=metrics.nmse_of(seen.lane(FREE_NATIVE), free) if free and FREE_NATIVE in lanes else None,
            fitting={name: policies for name, (_, policies) in judged.items()},
            stated=self._stated(seen),
        )

    def _stated(self, seen: Compared) -> Tried:
        """The statistics that the candidate states of a tap, each with what is right."""
        source = self.sources.get("candidate")
        stated = source.trace.printed.stated.get(seen.tap.name) if source is not None else None
        if source is None or not stated or "baseline" not in seen.recorded:
            return {}
        return held(stated, seen.values("baseline"), [seen.whole(lane) for lane in seen.lanes_of(source)])

    def _drift(self, seen: Compared) -> metrics.Difference | None:
        """The candidate against the baseline, where both have values; without a candidate, the free run."""
        recorded, every = seen.recorded, self.sources.values()
        alone = "candidate" not in self.sources
        if "baseline" not in recorded or (FREE not in seen.lanes if alone else "candidate" not in recorded):
            return None
        right = seen.values("baseline", *every)
        if self.tap_is_printed(seen.tap.name):
            return metrics.difference_of(seen.told(self.sources["candidate"], right), right)
        return metrics.difference_of(seen.lane(FREE, *every) if alone else seen.values("candidate", *every), right)

    def tap_is_printed(self, name: str) -> bool:
        """Whether the candidate's values of a tap were read from a log."""
        return "candidate" in self.sources and name in self.sources["candidate"].trace.printed.slack

    def _local(self, source: Source, seen: Compared, span: tuple[str, ...]) -> tuple[Local, tuple[frozenset[str], ...]]:
        """A source's own error under the arithmetic that fits best, in each phase (prefill, decode); and which fit."""
        tap, fitted = seen.tap, Fitted.of(seen, source, self._phases)
        label = self._label(source, tap, fitted.policy)
        match = self._match(source, tap, label)
        expected, shown = fitted.expected(seen, source), self.shown.setdefault(source.name, Shown())
        recorded = seen.told(source, expected)
        kind = self._kind(tap) if source.multiplies(tap) and not span else None
        noise = TapNoise(source, seen, expected, span, shown, kind is not None and (kind, label) in shown.exact)
        kept = source.precision_of(tap.name)
        besides, peaked = self._besides(source, tap)
        bounds = Allowance(expected, match, lambda: noise.samples(match), kept, besides, peaked)
        per_row, sizes = expected.errors(recorded), expected.reference()
        largest, worst = metrics.worst_of(recorded, expected)
        verdict = bounds.verdict(per_row, largest, recorded)
        if verdict == tolerances.MATCH and (label in arithmetic.EIGHT_BITS or self.tap_is_printed(tap.name)):
            verdict = tolerances.NOISE
        unclear = verdict == tolerances.WRONG and span and noise.is_unclear(per_row, fitted.errors)
        if unclear or (verdict == tolerances.WRONG and self.tap_is_printed(tap.name) and not noise.is_far(per_row)):
            verdict = tolerances.UNCHECKED
        wrong, trusted = verdict == tolerances.WRONG, source.name == "baseline"
        if not trusted and verdict in (tolerances.MATCH, tolerances.NOISE):
            missed = fitted.missed(max(APART * float(per_row.sum()), bounds.whole))
            shown.note(missed, kind, label if verdict == tolerances.MATCH else None)
        hiding = bounds.unseen if trusted and verdict == tolerances.MATCH else bounds.hiding()
        room = source.trace.printed.slack.get(tap.name) if not trusted else None
        printed = 0.0 if room is None else metrics.ratio(float(np.square(room).sum()), float(sizes.sum()))
        found = Local(
            nmse=metrics.ratio(float(per_row.sum()), float(sizes.sum())),
            arithmetic=None if wrong else label, limit=match, noise_limit=hiding.whole, verdict=verdict,
            token=worst.token, index=worst.index, expected=worst.baseline, recorded=worst.candidate,
            per_token=tuple(metrics.ratio(float(e), float(r)) for e, r in zip(per_row, sizes, strict=True)),
            least=fitted.least, span=span, unclear=verdict == tolerances.UNCHECKED,
            facts=self._facts(source, seen, fitted.typical(seen, source), max(match, hiding.whole)) if wrong else (),
            hides=max(hiding.whole, printed), hides_row=hiding.row, hides_value=hiding.value,
        )  # fmt: skip
        return found, fitted.policies(match)

    def _label(self, source: Source, tap: taps.Tap, policy: str) -> str:
        """What a tap's operands were rounded to, in words."""
        read = source.reading.get(self._kind(tap)) if source.multiplies(tap) else None
        if read is not None and read.size:
            return f"about {read.bits} bits"
        return rounding_type(policy, self._kind(tap), source.stored, source.reading)

    def _qualified(self, source: Source, seen: Compared, local: Local) -> Local:
        """A judgement in view of what is not finite."""
        values, opened = seen.values(source.name, source, ranked=True), seen.opened(source)
        if values.finite and opened is None:
            return local
        sides = (seen.recorded[source.name], seen.x[seen.lanes.index(seen.exact(source))])
        recorded, right = (seen.comparable(side, source, ranked=True) for side in sides)
        return qualified(local, recorded, right, opened, seen.tap.row_axis)

    @property
    def _phases(self) -> tuple[slice, slice]:
        """Rows of the decode steps, and of the prefill."""
        return slice(self.n_prefill, None), slice(0, self.n_prefill)

    def _facts(self, source: Source, seen: Compared, lane: Lane, limit: float) -> tuple[Fact, ...]:
        """What the errors of the first wrong taps of each kind look like; other layers' are most likely the same."""
        tap, key = seen.tap, (source.name, seen.tap.kind.word)
        if self.described[key] >= DESCRIBED or tap.name in source.trace.known:
            return ()
        self.described[key] += 1
        values = (seen.recorded[source.name], seen.x[seen.lanes.index(lane)])
        recorded, expected = (seen.comparable(array, source, ranked=True) for array in values)
        return profile(Deviation.of(
            tap, recorded, expected, limit, others=self._look_alikes(source, tap, recorded.size),
            inputs=_inputs(source, tap), rope=self._rope(tap), positions=[int(p) for p in self.positions],
            dim=self.sizes.get("dim_v" if "dim_v" in tap.kind.axes[-1] else "dim"),
        ))  # fmt: skip

    def _rope(self, tap: taps.Tap) -> Rope | None:
        """The RoPE that a tap is the result of, where it is known."""
        rotates = tap.kind.op == "ROPE" and tap.layer is not None and tap.layer < len(self.ropes)
        return self.ropes[tap.layer] if rotates and tap.layer is not None else None

    def _look_alikes(self, source: Source, tap: taps.Tap, size: int) -> Mapping[str, Array]:
        """Tensors of this size that the values might be instead: the trace's own before it, the baseline's others."""
        out: dict[str, Array] = {}
        for trace, label in ((source.trace, "its own {}"), (self.sources["baseline"].trace, "the baseline's {}")):
            before = True
            for name in trace:
                before = before and name != tap.name
                wanted = before if trace is source.trace else name != tap.name
                if wanted and name not in trace.known and int(np.prod(trace.shape(name))) == size and len(out) < MOST:
                    out[label.format(name)] = trace[name]
        return out

    def _kind(self, tap: taps.Tap) -> str:
        return operand_kind(tap.kind.word, tap.kind.op, self.weight_types.get(tap.name)) or "F32"

    def _match(self, source: Source, tap: taps.Tap, label: str) -> float:
        """The NMSE of right arithmetic, from the table."""
        rule = tolerances.rule_for(self.rules, tap.name, tap.kind.op, label)
        rope = self._rope(tap)
        match = rule.match + (rule.angle * self.mean_square_angle[rope] if rope is not None else 0.0)
        if source.flash_attn and tap.kind.word == "kqv_out" and source.stored[CACHE_V] == "F16":
            # one rounding a key and one of each weight, as in ggml/ops/attention.py; sums grow to their last value
            match += tolerances.ROUNDING["f16"] * (len(self.positions) + 1)
        return match

    def _besides(self, source: Source, tap: taps.Tap) -> tuple[float, float]:
        """What no lane shows: what was read back of the op itself, and how many times that some values may have.

        Of RoPE's angles one pair in a head may have all of the error.
        """
        read, rope = source.reading.get(tap.kind.op), self._rope(tap)
        pairs = source.trace.shape(tap.name)[-1] / 2 if rope is not None else 1.0
        return (SHAKEN * read.size**2, pairs) if read is not None else (0.0, 1.0)


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
        lanes = [lane for lane in seen.lanes_of(source) if not lane.shaken]
        values = [seen.lane(lane, source, ranked=True) for lane in lanes]
        errors = [right.errors(seen.told(source, right)) for right in values]
        sizes = values[0].reference()
        kept = tolerances.ROUNDING[source.shown_in(seen.tap.name)]
        best = [lanes[fit.nearest([error[phase] for error in errors], sizes[phase], kept)] for phase in phases]
        return cls(lanes, errors, sizes, phases, best)

    @property
    def policy(self) -> str:
        """That of the prefill, the last phase."""
        return self.best[-1].policy

    def expected(self, seen: Compared, source: Source) -> metrics.Rows:
        """What the best lanes computed."""
        return seen.in_phases(self.best, self.phases, source)

    @property
    def least(self) -> float:
        """The NMSE under the arithmetic that has the smallest error in each phase."""
        total = sum(min(float(error[phase].sum()) for error in self.errors) for phase in self.phases)
        return metrics.ratio(total, float(self.sizes.sum()))

    def missed(self, least: float) -> set[str]:
        """The policies that err by more than this."""
        return {lane.policy for lane, error in zip(self.lanes, self.errors, strict=True) if error.sum() > least}

    def policies(self, match: float) -> tuple[frozenset[str], ...]:
        """Those that fit, in each phase that has rows."""
        return tuple(
            frozenset(
                lane.policy
                for lane, error in zip(self.lanes, self.errors, strict=True)
                if metrics.ratio(float(error[phase].sum()), float(self.sizes[phase].sum())) <= match
            )
            for phase in self.phases
            if len(self.sizes[phase])
        )

    def typical(self, seen: Compared, source: Source) -> Lane:
        """The lane that most values are nearest to: rows are the fault's, most values tell which arithmetic it was."""
        recorded = seen.values(source.name, source, ranked=True)
        gaps = [_typical_gap(recorded, seen.lane(lane, source, ranked=True)) for lane in self.lanes]
        return self.lanes[int(np.argmin(gaps))]


def _typical_gap(a: metrics.Rows, b: metrics.Rows) -> float:
    """The median distance of two tensors' values."""
    gap = np.abs(a.values - b.values)
    return float(np.median(np.where(np.isnan(gap), np.inf, gap)))


def _inputs(source: Source, tap: taps.Tap) -> dict[str, Array]:
    """What a source recorded of the taps that one may read in its layer."""
    words = [*re.split(r"[ |]", tap.kind.inputs), *(["Vcur_proj"] if tap.kind.word == "kqv_out" else [])]
    names = [f"{word}-{tap.layer}" for word in words]
    return {name: source.trace[name] for name in names if name in source.trace and name not in source.trace.known}
