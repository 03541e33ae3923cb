"""The judge: one tap's lanes against what the traces recorded, and what of the difference is rounding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from llamaref.config import Rope
from numpy.typing import NDArray

from llamadiff.judge.allowance import WHOLE, Allowance, Hiding, unseen
from llamadiff.judge.by_sketch import Sketched
from llamadiff.judge.compared import Compared, Errors
from llamadiff.judge.finding import Finding, Local, Tried
from llamadiff.judge.finiteness import qualified
from llamadiff.judge.fit import Fitted
from llamadiff.judge.lanes import FREE, FREE_NATIVE, Source
from llamadiff.judge.noise import MAY_ROUND, SHAKEN, Shown, TapNoise
from llamadiff.judge.pattern.described import described
from llamadiff.judge.pattern.deviation import Fact
from llamadiff.judge.sketching import drift_from, stats_of
from llamadiff.judge.statistics import held
from llamadiff.numerics import arithmetic, cpu, metrics, tolerances
from llamadiff.numerics.closeup import Closeup, closeup
from llamadiff.numerics.policies import CACHE_V, NATIVE, operand_kind, rounding_type, sums_of
from llamadiff.trace import taps
from llamadiff.trace.sketch import RowSketch

Array = NDArray[Any]
DESCRIBED = 3  # wrong taps of a kind whose errors are described
APART = 10.0  # an arithmetic that misses a product by so many times as much as another is not the engine's


@dataclass
class Judge:
    """The facts of one run that every tap is judged by.

    ``weight_types``: tap name -> type of the weight it multiplies by; ``edges``: where batches begin and end;
    ``ropes`` of the layers, and ``mean_square_angle`` of each of them, radians; ``sizes`` of axes.
    ``described``: how many errors of a kind have facts already; ``pictured``: the source of which close-ups are kept;
    ``shown``: by source, what right taps have shown of its arithmetic. ``lost``: by source and tap, the NMSE of sums in
    float16 that were not followed. ``ways``: those in which the candidate's sums are kept in float16, as its taps show
    (numerics/half_sums.py).
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
    pictured: str | None = None
    lost: dict[tuple[str, str], float] = field(default_factory=dict)
    ways: set[str] = field(default_factory=set)

    def finding(self, seen: Compared, spans: Mapping[str, tuple[str, ...]]) -> Finding:
        """Judge one tap; ``spans`` by source."""
        lanes, recorded, replayed = seen.lanes, seen.recorded, {lane.source for lane in seen.lanes}
        judged = {name: self._judgement(self.sources[name], seen, spans[name]) for name in recorded if name in replayed}
        local = {name: self._local(found) for name, found in judged.items()}
        free = seen.lane(FREE) if FREE in lanes else None
        return Finding(
            tap=seen.tap,
            shape=seen.x[0].shape,
            local=local,
            at={name: seen.at(found.index) for name, found in local.items()},
            stats=self._stats(seen, free),
            drift=self._drift(seen),
            distance={name: seen.distance(name) for name in recorded} if free else {},
            noise=metrics.nmse_of(seen.lane(FREE_NATIVE), free) if free and FREE_NATIVE in lanes else None,
            fitting={name: found.fitted.policies(found.bounds.match) for name, found in judged.items()},
            stated=self._stated(seen),
            closeups={name: each for name, found in judged.items() if (each := self._closeup(found)) is not None},
        )

    def of_sketches(
        self, seen: Compared, spans: Mapping[str, tuple[str, ...]], sketched: Mapping[str, Sketched]
    ) -> Finding:
        """The finding of a product that clearly is a match in all of its sources: its lanes have what they recorded."""
        tap, matches = seen.tap, {name: self.match_of(self.sources[name], seen.tap) for name in sketched}
        return Finding(
            tap=tap,
            shape=seen.x[0].shape,
            local={name: self._sketched(tap, self.sources[name], each, spans[name]) for name, each in sketched.items()},
            at={name: {} for name in sketched},
            stats=self._stats(seen, None),
            drift=self._drift(seen),
            distance={},
            noise=None,
            fitting={name: each.fitting(matches[name], self.phases) for name, each in sketched.items()},
            stated=self._stated(seen),
        )

    def _sketched(self, tap: taps.Tap, source: Source, found: Sketched, span: tuple[str, ...]) -> Local:
        """A match as plain data, and what it shows of its source's arithmetic."""
        label = self._label(source, tap, found.policies[-1])
        match = self._match(source, tap, label)
        if source.name != "baseline":
            kind = self._kind(tap) if source.multiplies(tap) and not span else None
            most = max(APART * found.rows.sum(), WHOLE * match * found.sizes.sum())
            missed = {policy for policy, errors in found.errors.items() if errors.sum() > most}
            self.shown.setdefault(source.name, Shown()).note(missed, kind, label, found.sizes)
        per_row, hiding = found.per_row, unseen(match)
        return Local(
            nmse=found.nmse, per_token=per_row, verdict=tolerances.MATCH, arithmetic=label, least=found.nmse,
            limit=match, noise_limit=match, span=span, token=int(np.argmax(per_row)), index=(),
            expected=np.nan, recorded=np.nan, hides=match, hides_row=hiding.row, hides_value=hiding.value,
            sketched=True,
        )  # fmt: skip

    def match_of(self, source: Source, tap: taps.Tap) -> float:
        """The NMSE that right arithmetic may have at a product, whichever of the source's policies it has."""
        return min(self._match(source, tap, self._label(source, tap, policy)) for policy in source.policies)

    def _closeup(self, found: Judgement) -> Closeup | None:
        """What a picture shows of a tap, where one is wanted of this source."""
        errors = found.errors
        if found.source.name != self.pictured:
            return None
        return closeup(errors.recorded, errors.right, found.seen.tap.kind.axes, errors.worst.index)

    def _stats(self, seen: Compared, free: metrics.Rows | None) -> dict[str, metrics.Stats]:
        """Each side's moments."""
        found = {name: seen.stats(name) for name in seen.recorded}
        sketch = self._sketch(seen.tap)
        if sketch is not None:
            found["baseline"] = stats_of(sketch)
        if free is None:
            return found
        own = metrics.stats(free)
        shaped = metrics.with_extremes(own, free.x) if seen.tap.kind.word == taps.RESIDUAL else own
        return {**found, "engine": shaped}

    def _stated(self, seen: Compared) -> Tried:
        """The statistics that the candidate states of a tap, each with what is right."""
        source = self.sources.get("candidate")
        stated = source.trace.printed.stated.get(seen.tap.name) if source is not None else None
        if source is None or not stated or "baseline" not in seen.recorded:
            return {}
        return held(stated, seen.values("baseline"), [seen.lane(lane) for lane in seen.lanes_of(source)])

    def _drift(self, seen: Compared) -> metrics.Difference | None:
        """The candidate against the baseline, where both have values; without a candidate, the free run."""
        recorded, every = seen.recorded, self.sources.values()
        if self._sketch(seen.tap) is not None:
            return self._estimated_drift(seen)
        alone = "candidate" not in self.sources
        if "baseline" not in recorded or (FREE not in seen.lanes if alone else "candidate" not in recorded):
            return None
        right = seen.values("baseline", *every)
        if not alone and seen.tap.name in self.sources["candidate"].trace.printed.slack:
            return metrics.difference_of(seen.told(self.sources["candidate"], right), right)
        return metrics.difference_of(seen.lane(FREE, *every) if alone else seen.values("candidate", *every), right)

    def _sketch(self, tap: taps.Tap) -> RowSketch | None:
        """What there is of a baseline's tap whose tensor was not kept."""
        sketch = self.sources["baseline"].trace.sketch
        return sketch.rows.get(tap.name) if sketch is not None else None

    def _estimated_drift(self, seen: Compared) -> metrics.Difference | None:
        """The same against a sketch; None for a candidate that has not all values, or has others."""
        sketch, right = self.sources["baseline"].trace.sketch, self._sketch(seen.tap)
        candidate = self.sources.get("candidate")
        if candidate is not None and not candidate.is_whole(seen.tap.name):
            return None
        own = seen.lane(FREE) if candidate is None else seen.values("candidate")
        assert sketch is not None
        assert right is not None
        if own.shape[0] != len(right.moments) or own.size != right.width * own.shape[0]:
            return None
        return drift_from(sketch, seen.tap.name, own)

    def _judgement(self, source: Source, seen: Compared, span: tuple[str, ...]) -> Judgement:
        """A source's own error under the arithmetic that fits best, in each phase (prefill, decode)."""
        tap, fitted = seen.tap, Fitted.of(seen, source, self.phases)
        label, right = self._label(source, tap, fitted.policy), fitted.right(seen, source)
        match, shown = self._match(source, tap, label), self.shown.setdefault(source.name, Shown())
        kind = self._kind(tap) if source.multiplies(tap) and not span else None
        noise = TapNoise(source, seen, right, span, shown, shown.is_exact(kind, label), match, self._kinds(span, tap))
        kinds = noise.kinds | {self._kind(tap)}
        kept = source.precision_of(tap.name)
        bounds = Allowance(right, match, noise.samples, kept, *self._besides(source, tap))
        found = Judgement(source, seen, fitted, label, Errors.of(seen.told(source, right), right), noise, bounds, kinds)
        if source.name != "baseline" and found.verdict in (tolerances.MATCH, tolerances.NOISE):
            missed = fitted.missed(max(APART * float(found.errors.rows.sum()), bounds.whole))
            shown.note(missed, kind, label if found.verdict == tolerances.MATCH else None, fitted.sizes)
        return found

    def _local(self, found: Judgement) -> Local:
        """A judgement as plain data, in view of what is not finite."""
        source, seen = found.source, found.seen
        local = found.local(self._facts(found) if found.verdict == tolerances.WRONG else ())
        values, opened = seen.values(source.name, source, ranked=True), seen.opened(source)
        if values.finite and opened is None:
            return local
        sides = (seen.recorded[source.name], seen.x[seen.lanes.index(seen.exact(source))])
        recorded, right = (seen.comparable(side, source, ranked=True) for side in sides)
        return qualified(local, recorded, right, opened, seen.tap.row_axis)

    def _facts(self, found: Judgement) -> tuple[Fact, ...]:
        """What the errors of the first wrong taps of each kind look like; other layers' are most likely the same."""
        source, tap = found.source, found.seen.tap
        if self.described[source.name, tap.kind.word] >= DESCRIBED or tap.name in source.trace.known:
            return ()
        self.described[source.name, tap.kind.word] += 1
        lane = found.fitted.typical(found.seen, source)
        dim = self.sizes.get("dim_v" if "dim_v" in tap.kind.axes[-1] else "dim")
        limit = max(found.bounds.match, found.hiding.whole)
        return described(found.seen, source, lane, limit, rope=self._rope(tap), dim=dim)

    def _label(self, source: Source, tap: taps.Tap, policy: str) -> str:
        """What a tap's operands were rounded to, in words."""
        read = source.reading.get(self._kind(tap)) if source.multiplies(tap) else None
        if read is not None and read.size:
            return f"about {read.bits} bits"
        to = rounding_type(policy, self._kind(tap), source.stored, source.reading)
        return f"{to}, sums in F16" if sums_of(policy, self._kind(tap), source.stored) else to

    @cached_property
    def phases(self) -> tuple[slice, ...]:
        """Rows that may each have an arithmetic of their own: the decode steps, and the prefill last."""
        return cpu.phases(self.edges, self.n_prefill)

    def _rope(self, tap: taps.Tap) -> Rope | None:
        """The RoPE that a tap is the result of, where it is known."""
        rotates = tap.kind.op == "ROPE" and tap.layer is not None and tap.layer < len(self.ropes)
        return self.ropes[tap.layer] if rotates and tap.layer is not None else None

    def _kind(self, tap: taps.Tap) -> str:
        return operand_kind(tap.kind.word, tap.kind.op, self.weight_types.get(tap.name)) or "F32"

    def _kinds(self, span: Sequence[str], tap: taps.Tap) -> frozenset[str]:
        """Of the ops of a span: what products multiply by, and others of which values may have 16 bits."""
        ops = [tap, *(inner for name in span if (inner := taps.parse(name)) is not None)] if span else []
        products = {self._kind(each) for each in ops if each.kind.op.startswith("MUL_MAT")}
        return frozenset(products | {each.kind.op for each in ops if each.kind.op in MAY_ROUND})

    def _match(self, source: Source, tap: taps.Tap, label: str) -> float:
        """The NMSE of right arithmetic, from the table."""
        rule = tolerances.rule_for(self.rules, tap.name, tap.kind.op, label)
        rope = self._rope(tap)
        match = rule.match + self.lost.get((source.name, tap.name), 0.0)
        match += rule.angle * self.mean_square_angle[rope] if rope is not None else 0.0
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
class Judgement:
    """One tap of one source: its ``errors`` under the arithmetic that fits best, called ``label``; their limits."""

    source: Source
    seen: Compared
    fitted: Fitted
    label: str
    errors: Errors
    noise: TapNoise
    bounds: Allowance
    kinds: frozenset[str]

    @cached_property
    def verdict(self) -> str:
        """MATCH, NOISE, WRONG, or UNCHECKED: as far off as a rounding may be that nothing here shows."""
        verdict = self.bounds.verdict(self.errors.rows, self.errors.largest, self.errors.recorded)
        if verdict == tolerances.MATCH and (self.label in arithmetic.EIGHT_BITS or self.is_printed):
            return tolerances.NOISE
        unclear = verdict == tolerances.WRONG and (
            self.rounds_in_an_unknown_way
            or (self.noise.span and self.noise.is_unclear(self.errors.rows, self.fitted.errors))
            or (self.is_printed and not self.noise.is_far(self.errors.rows))
        )
        return tolerances.UNCHECKED if unclear else verdict

    @property
    def rounds_in_an_unknown_way(self) -> bool:
        """Whether its op, or one in its span, rounds to eight bits, and nobody knows how its ggml does that."""
        stored = self.source.stored
        return stored.get("q8") == cpu.UNKNOWN and any(
            rounding_type(NATIVE, kind, stored).startswith("Q8") for kind in self.kinds
        )

    @property
    def is_printed(self) -> bool:
        """Whether the values were read from a log."""
        return self.seen.tap.name in self.source.trace.printed.slack

    @property
    def hiding(self) -> Hiding:
        """What could hide: in llama.cpp's own matches, no more than the table says."""
        matches = self.source.name == "baseline" and self.verdict == tolerances.MATCH
        return unseen(self.bounds.match) if matches else self.bounds.hiding()

    def local(self, facts: tuple[Fact, ...]) -> Local:
        """It as plain data; ``facts`` say what its errors look like."""
        errors, hiding, worst = self.errors, self.hiding, self.errors.worst
        room = self.source.trace.printed.slack.get(self.seen.tap.name)
        printed = 0.0 if room is None else metrics.ratio(float((room * room).sum()), float(errors.sizes.sum()))
        return Local(
            nmse=errors.nmse, per_token=errors.per_row, verdict=self.verdict, facts=facts,
            arithmetic=None if self.verdict == tolerances.WRONG else self.label, least=self.fitted.least,
            limit=self.bounds.match, noise_limit=hiding.whole, span=tuple(self.noise.span),
            token=worst.token, index=worst.index, expected=worst.baseline, recorded=worst.candidate,
            unclear=self.verdict == tolerances.UNCHECKED,
            guess=self.noise.guess if self.verdict == tolerances.NOISE else None,
            hides=max(hiding.whole, printed), hides_row=hiding.row, hides_value=hiding.value,
        )  # fmt: skip
