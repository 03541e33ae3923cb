"""One tap's lanes against what the traces recorded, and what of the difference rounding may have made: in numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from llamaref.config import Rope
from numpy.typing import NDArray

from llamadiff import plugins
from llamadiff.judge.allowance import WHOLE, Allowance, unseen
from llamadiff.judge.compared import Compared, Errors
from llamadiff.judge.fact import Fact
from llamadiff.judge.finding import Finding, Tried
from llamadiff.judge.finiteness import restrict_to_finite
from llamadiff.judge.fit import Fitted, count_distinct
from llamadiff.judge.lanes import FREE, FREE_NATIVE, Lane, Source
from llamadiff.judge.measurement import (
    SURE,
    UNKNOWN_Q8,
    UNKNOWN_SUMS,
    VARIANTS,
    AllowedError,
    Printed,
    Sketched,
    TapEvidence,
    TapMeasurement,
    UnknownRounding,
    matches,
)
from llamadiff.judge.noise import PERTURBED_FACTOR, TapNoise
from llamadiff.judge.sketching import drift_from, stats_of
from llamadiff.judge.statistics import compare_statistics
from llamadiff.numerics import cpu, metrics, tolerances
from llamadiff.numerics.pictures import closeup_of
from llamadiff.numerics.policies import (
    CACHE_V,
    CACHES,
    F32,
    IN_ATTENTION,
    MAY_ROUND,
    NATIVE,
    operand_kind,
    rounding_type,
    sums_of,
)
from llamadiff.trace import taps
from llamadiff.trace.sketch import RowSketch

Array = NDArray[Any]
DESCRIBED = 3  # wrong taps of a kind whose errors are described
APART = 10.0  # an arithmetic that misses a product by so many times as much as another is not the engine's


@dataclass
class Judge:
    """The facts of one run that every tap is measured by.

    ``weight_types``: tap name -> type of the weight it multiplies by; ``edges``: where batches begin and end;
    ``ropes`` of the layers; ``sizes`` of axes; ``pictured``: the source of which close-ups are kept.
    """

    sources: Mapping[str, Source]
    weight_types: Mapping[str, str]
    rules: Sequence[tolerances.Rule]
    positions: Array
    n_prefill: int
    ropes: Sequence[Rope | None]
    sizes: Mapping[str, int]
    edges: tuple[int, ...]
    pictured: str | None = None

    def measure_tap(
        self, seen: Compared, spans: Mapping[str, tuple[str, ...]], before: Sequence[Finding], sums: frozenset[str]
    ) -> Finding:
        """What is to be known of one tap; ``spans`` by source. ``before``: findings of the taps before it; ``sums``:
        those ways to add in float16 that the candidate's shows.
        """
        lanes, recorded, replayed = seen.lanes, seen.recorded, {lane.source for lane in seen.lanes}
        looks = {name: self._looked_at(self.sources[name], seen, spans[name]) for name in recorded if name in replayed}
        measured = {name: self._measure_source(found, before) for name, found in looks.items()}
        free = seen.lane(FREE) if FREE in lanes else None
        return Finding(
            tap=seen.tap,
            shape=seen.x[0].shape,
            measured=measured,
            at={name: seen.values_at(found.index) for name, found in measured.items()},
            stats=self._stats(seen, free),
            drift=self._drift(seen),
            distance={name: seen.distance(name) for name in recorded} if free else {},
            noise=metrics.nmse_of(seen.lane(FREE_NATIVE), free) if free and FREE_NATIVE in lanes else None,
            fitting={name: found.fitted.policies(found.bounds.match) for name, found in looks.items()},
            stated=self._compare_statistics(seen),
            sums=sums,
            closeups={name: each for name, found in looks.items() if (each := self._closeup(found)) is not None},
        )

    def of_sketches(
        self, seen: Compared, spans: Mapping[str, tuple[str, ...]], sketched: Mapping[str, Sketched]
    ) -> Finding:
        """The finding of a product that clearly is a match in all of its sources: its lanes have what they recorded."""
        tap, matches = seen.tap, {name: self.match_of(self.sources[name], seen.tap) for name in sketched}
        return Finding(
            tap=tap,
            shape=seen.x[0].shape,
            measured={
                name: self._measure_sketched(tap, self.sources[name], s, spans[name]) for name, s in sketched.items()
            },
            at={name: {} for name in sketched},
            stats=self._stats(seen, None),
            drift=self._drift(seen),
            distance={},
            noise=None,
            fitting={name: each.fitting_policies(matches[name], self.phases) for name, each in sketched.items()},
            stated=self._compare_statistics(seen),
        )

    def _measure_sketched(
        self, tap: taps.Tap, source: Source, found: Sketched, span: tuple[str, ...]
    ) -> TapMeasurement:
        """A match in numbers, and what it shows of its source's arithmetic."""
        policy = found.policies[-1]
        label, match = self._label(source, tap, policy), self._match(source, tap, policy)
        most = max(APART * found.rows.sum(), WHOLE * match * found.sizes.sum())
        fits = found.fitting_policies(match, self.phases)[-1]
        missed = frozenset(name for name, errors in found.errors.items() if errors.sum() > most)
        per_row, hiding = found.per_row, unseen(match)
        return TapMeasurement(
            nmse=found.nmse, per_token=per_row, label=label, limit=match, is_even=True, least=found.nmse,
            allowances={SURE: AllowedError(True, match, hiding.row, hiding.value)}, span=span,
            token=int(np.argmax(per_row)), sketched=True,
            evidence=self._evidence(source, tap, span, policy, fits, missed, found.sizes),
        )  # fmt: skip

    def match_of(self, source: Source, tap: taps.Tap) -> float:
        """The NMSE that right arithmetic may have at a product, whichever of the source's policies it has."""
        return min(self._match(source, tap, policy) for policy in source.policies)

    def _closeup(self, found: _Looked) -> object:
        """What a picture shows of a tap, where one is wanted of this source."""
        errors = found.errors
        if found.source.name != self.pictured:
            return None
        return closeup_of(errors.recorded, errors.right, found.seen.tap.kind.axes, errors.worst.index)

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

    def _compare_statistics(self, seen: Compared) -> Tried:
        """The statistics that the candidate states of a tap, each with what is right."""
        source = self.sources.get("candidate")
        stated = source.trace.printed.stated.get(seen.tap.name) if source is not None else None
        if source is None or not stated or "baseline" not in seen.recorded:
            return {}
        return compare_statistics(stated, seen.values("baseline"), [seen.lane(lane) for lane in seen.lanes_of(source)])

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
            return metrics.difference_of(seen.clamp_to_print_precision(self.sources["candidate"], right), right)
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

    def _looked_at(self, source: Source, seen: Compared, span: tuple[str, ...]) -> _Looked:
        """A source's own error under the arithmetic that fits best, in each phase (prefill, decode)."""
        tap, fitted = seen.tap, Fitted.of(seen, source, self.phases)
        right = fitted.right(seen, source)
        match = self._match(source, tap, fitted.policy) + self._unfollowed_error(source, seen, fitted.policy)
        cached = len(self.positions) * self.sizes["kv_head"] * self.sizes["dim"]
        noise = TapNoise(source, seen, right, fitted.errors, span, match, self._kinds(source, span, tap), cached)
        besides = self._besides(source, tap)
        bounds = Allowance(right, match, lambda: noise.sure, source.precision_of(tap.name), *besides)
        return _Looked(
            source, seen, fitted, Errors.of(seen.clamp_to_print_precision(source, right), right), noise, bounds
        )

    def _measure_source(self, found: _Looked, before: Sequence[Finding]) -> TapMeasurement:
        """What was seen in numbers, in view of what is not finite."""
        source, seen, errors, fitted, noise = found.source, found.seen, found.errors, found.fitted, found.noise
        tap, span, match = seen.tap, tuple(noise.span), found.bounds.match
        is_even = found.bounds.is_even(errors.rows, errors.largest)
        allowances = dict(found.allowances(is_even))
        is_match, sure = matches(is_even, errors.nmse, match, allowances), allowances[SURE]
        fits = fitted.policies(match)[-1] if is_match else frozenset[str]()
        most = max(APART * float(errors.rows.sum()), found.bounds.whole)
        missed = frozenset(fitted.missed_policies(most) if sure.fits else ())
        evidence = self._evidence(source, tap, span, fitted.policy, fits, missed, fitted.sizes)
        if span and not is_match:
            certain = frozenset({fitted.policy} if noise.is_certain else ()) - {F32}
            correlation = noise.rounding_correlation() if source.name != "baseline" else {}
            evidence = replace(evidence, seen=evidence.seen | certain, rounding_correlation=correlation)
        worst, facts_limit = errors.worst, allowances.get(VARIANTS, sure).whole
        measured = TapMeasurement(
            nmse=errors.nmse, per_token=errors.per_row, label=self._label(source, tap, fitted.policy), limit=match,
            is_even=is_even, allowances=allowances, evidence=evidence, least=fitted.least,
            policy_distances={} if is_match else noise.policy_distances(),
            unknown_rounding=(
                UnknownRounding() if is_match or not span else noise.unknown_rounding(errors.rows, self.phases)
            ),
            printed=self._printed_error(found), unknown=self._unknown(source, span, tap),
            span=span, token=worst.token, index=worst.index,
            expected=worst.baseline, recorded=worst.candidate,
            facts=() if sure.fits else self._facts(found, facts_limit, before),
        )  # fmt: skip
        values, opened = seen.values(source.name, source, ranked=True), seen.undetermined(source)
        if values.finite and opened is None:
            return measured
        sides = (seen.recorded[source.name], seen.x[seen.lanes.index(seen.exact(source))])
        recorded, right = (seen.comparable(side, source, ranked=True) for side in sides)
        return restrict_to_finite(measured, recorded, right, opened, tap.row_axis)

    def _evidence(
        self, source: Source, tap: taps.Tap, span: tuple[str, ...], policy: str, fits: frozenset[str],
        missed: frozenset[str], sizes: Array,
    ) -> TapEvidence:  # fmt: skip
        """What a tap tells of its source's arithmetic, if the policies in ``fits`` fit it and those ``missed`` do not.

        ``sizes``: the squares of its rows. Values of 16 bits tell nothing of ops that may have those, nor does one
        token of attention, in which nothing is turned or weighed.
        """
        kinds = self._kinds(source, span, tap)
        silent = {*CACHES, *IN_ATTENTION} if len(self.positions) < 2 else set[str]()
        if source.name == "baseline" or source.precision_of(tap.name) != F32:
            silent |= {*MAY_ROUND}
        labels = {kind: self._rounded_to(source, tap, span, kind, policy) for kind in kinds - silent} if fits else {}
        return TapEvidence(
            kinds=kinds,
            product=self._kind(tap) if source.multiplies(tap) and not span else None,
            seen=fits - {F32} if F32 in missed else frozenset(),
            unseen=missed - fits,
            labels=labels,
            distinct_rows=count_distinct(sizes),
        )

    def _rounded_to(self, source: Source, tap: taps.Tap, span: Sequence[str], kind: str, policy: str) -> str:
        """What a kind of operand is rounded to."""
        if not span and kind == self._kind(tap):
            return self._label(source, tap, policy)
        return rounding_type(policy, kind, source.stored, source.reading)

    def _printed_error(self, found: _Looked) -> Printed | None:
        """How far off printed values are."""
        source, name = found.source, found.seen.tap.name
        room = source.trace.printed.slack.get(name)
        if room is None:
            return None
        slack = metrics.ratio(float((room * room).sum()), float(found.errors.sizes.sum()))
        far, far_from_known = (found.noise.is_far(found.errors.rows, known) for known in (False, True))
        return Printed(slack, far, far_from_known)

    def _unknown(self, source: Source, span: Sequence[str], tap: taps.Tap) -> str:
        """What nobody knows of how its ggml computes a tap's op, or one in its span; empty if there is nothing."""
        kinds = {*self._kinds(source, span, tap), self._kind(tap)}
        to = [rounding_type(NATIVE, kind, source.stored) for kind in kinds]
        if source.stored.get("q8") == cpu.UNKNOWN and any(kind.startswith("Q8") for kind in to):
            return UNKNOWN_Q8
        return UNKNOWN_SUMS if source.stored.get("sums") == cpu.UNKNOWN and "F16" in to else ""

    def _facts(self, found: _Looked, limit: float, before: Sequence[Finding]) -> tuple[Fact, ...]:
        """What the errors of the first taps of each kind look like that may be wrong; other layers' are most likely
        the same. ``limit``: the NMSE that rounding may leave.
        """
        source, tap = found.source, found.seen.tap
        same = (f.measured.get(source.name) for f in before if f.tap.kind.word == tap.kind.word)
        described_before = sum(each is not None and not each.allowances[SURE].fits for each in same)
        if described_before >= DESCRIBED or tap.name in source.trace.known:
            return ()
        lane = found.fitted.typical(found.seen, source)
        dim = self.sizes.get("dim_v" if "dim_v" in tap.kind.axes[-1] else "dim")
        limit = max(found.bounds.match, limit)
        rope = self._rope(tap)
        return plugins.ask_first(lambda each: each.facts(found.seen, source, lane, limit, rope, dim)) or ()

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

    def _kinds(self, source: Source, span: Sequence[str], tap: taps.Tap) -> frozenset[str]:
        """Of the ops of a span, or of a tap: what products multiply by, and others of which values may have 16 bits."""
        inner = [each for name in span if (each := taps.parse(name)) is not None]
        products = {self._kind(each) for each in (*inner, tap) if each.kind.op.startswith("MUL_MAT")}
        if not span and not source.multiplies(tap):
            products = set()
        return frozenset(products | {each.kind.op for each in (*inner, tap) if each.kind.op in MAY_ROUND})

    def _match(self, source: Source, tap: taps.Tap, policy: str) -> float:
        """The NMSE of right arithmetic, from the table."""
        rule = tolerances.rule_for(self.rules, tap.name, tap.kind.op, self._label(source, tap, policy))
        match = rule.match
        if source.flash_attn and tap.kind.word == "kqv_out" and source.stored[CACHE_V] == "F16":
            # one rounding a key and one of each weight, as in ext/graph/ops/attention.py; sums grow to their last value
            match += tolerances.ROUNDING["f16"] * (len(self.positions) + 1)
        return match

    def _unfollowed_error(self, source: Source, seen: Compared, policy: str) -> float:
        """The NMSE of what no lane follows: some sums in float16, and how far off float32 leaves RoPE's angles."""
        lost = seen.unfollowed.sums.get(Lane(source.name, policy), 0.0)
        rope = self._rope(seen.tap)
        if rope is None:
            return lost
        rule = tolerances.rule_for(self.rules, seen.tap.name, seen.tap.kind.op, self._label(source, seen.tap, policy))
        return lost + rule.angle * seen.unfollowed.mean_square_angle[rope]

    def _besides(self, source: Source, tap: taps.Tap) -> tuple[float, float]:
        """What no lane shows: what was read back of the op itself, and how many times that some values may have.

        Of RoPE's angles one pair in a head may have all of the error.
        """
        read, rope = source.reading.get(tap.kind.op), self._rope(tap)
        pairs = source.trace.shape(tap.name)[-1] / 2 if rope is not None else 1.0
        return (PERTURBED_FACTOR * read.size**2, pairs) if read is not None else (0.0, 1.0)


@dataclass(frozen=True)
class _Looked:
    """One tap of one source: its ``errors`` under the arithmetic that fits best, and their limits."""

    source: Source
    seen: Compared
    fitted: Fitted
    errors: Errors
    noise: TapNoise
    bounds: Allowance

    def allowances(self, is_even: bool) -> Iterator[tuple[str, AllowedError]]:
        """What the errors are held to; of those that are even, the first will do."""
        yield SURE, self._allowed_error(self.bounds)
        if not is_even:
            for way, samples in self.noise.others():
                yield way, self._allowed_error(replace(self.bounds, samples=partial(list, samples)))

    def _allowed_error(self, bounds: Allowance) -> AllowedError:
        errors = self.errors
        fits = bounds.is_even(errors.rows, errors.largest) or bounds.holds(errors.rows, errors.recorded)
        own_match = self.source.name == "baseline" and fits and errors.nmse <= bounds.match
        hiding = (
            unseen(bounds.match) if own_match else bounds.detection_floor()
        )  # llama.cpp's: no more than the table says
        return AllowedError(fits, hiding.whole, hiding.row, hiding.value)
