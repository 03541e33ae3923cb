"""The judge: one tap's lanes against what the traces recorded, and what of the difference is rounding."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from llamaref.config import Rope
from numpy.typing import NDArray

from llamadiff import arithmetic, fit, limits, metrics, taps
from llamadiff.allowance import OWN, WHOLE, Allowance, Sample
from llamadiff.finiteness import open_places, qualified
from llamadiff.lanes import (
    ANGLES,
    F32,
    FREE,
    FREE_NATIVE,
    GELU,
    JITTER,
    READ,
    READ_SHAKEN,
    ROUGH,
    ROUGH_CACHE,
    Lane,
    Source,
    rounding_type,
)
from llamadiff.profile import Profile, profile, rotations

Array = NDArray[Any]
MOST = 200  # look-alikes that are compared
# How many times the square of a sample of rounding counts: of a shaken lane, of one that is shaken in its last bits,
# of an arithmetic that is done in another way.
SHAKEN, SHAKEN_F32, VARIANT = 2.0, 64.0, 0.02
SURE = 1e-9  # NMSE of a row that an arithmetic has exactly, through a span
APART = 10.0  # an arithmetic that misses a product by so many times as much as another is not the engine's
FLIPPED = 1.0  # of an arithmetic on inputs that were kept in 16 bits: what is rounded again may go the other way


@dataclass(frozen=True)
class Local:
    """A recorded tap against what the engine computes from the same trace's inputs.

    ``arithmetic`` is the one that fits (None where none does). ``expected`` and ``recorded`` are the two values
    at ``index``, where they differ most. ``span`` names the unrecorded taps this one answers for as well. ``least`` is
    the smallest NMSE that an arithmetic leaves, if it has one error for all rows; ``hides`` the largest that would be
    taken for rounding, ``hides_row`` that of one row, ``hides_value`` the largest
    |error| / rms of one value. ``unclear``: unchecked, since an unknown rounding in the span may err as much.
    ``not_finite`` values were recorded where finite ones are right; ``opened`` values could not be judged, since no
    finite ones are right there on these inputs, in the rows of ``open_tokens``: errors are over the others, NaN where
    there are none.
    """

    nmse: float
    arithmetic: str | None
    limit: float
    noise_limit: float
    verdict: str
    token: int | None
    index: tuple[int, ...]
    expected: float
    recorded: float
    per_token: tuple[float, ...]
    span: tuple[str, ...]
    profile: Profile | None = None
    least: float = 0.0
    hides: float = 0.0
    hides_row: float = 0.0
    hides_value: float = 0.0
    unclear: bool = False
    not_finite: int = 0
    opened: int = 0
    open_tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class Finding:
    """All that a pass found out about one tap; without a free run, nothing of that."""

    tap: taps.Tap
    shape: tuple[int, ...]
    local: Mapping[str, Local]  # by source
    stats: Mapping[str, metrics.Stats]  # by source, and "engine" for the free run
    drift: metrics.Difference | None  # candidate (or the free run) against the baseline
    noise: float | None  # what the baseline's arithmetic alone does to a free run
    at: Mapping[str, Mapping[str, float]]  # by source: every side's value where that source's local error is largest
    fitting: Mapping[str, Sequence[frozenset[str]]]  # by source: the policies that fit, for each phase
    distance: Mapping[str, float]  # by source: NMSE against the free run, which computes in float32 throughout


@dataclass
class Judge:
    """The facts of one run that every tap is judged by.

    ``weight_types``: tap name -> type of the weight it multiplies by; ``ropes`` of the layers, and
    ``mean_square_angle`` of each of them, radians. ``described``: errors that have a profile already;
    ``shown``: by source and kind of operand, the arithmetics that products have shown it not to have; ``known``:
    sources that have shown which arithmetic they do have.
    """

    sources: Mapping[str, Source]
    weight_types: Mapping[str, str]
    rules: Sequence[limits.Rule]
    positions: Array
    n_prefill: int
    ropes: Sequence[Rope | None]
    mean_square_angle: dict[Rope, float] = field(default_factory=dict)
    described: set[tuple[str, str]] = field(default_factory=set)
    shown: dict[str, dict[str, set[str]]] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)

    def finding(
        self,
        tap: taps.Tap,
        x: Array,
        lanes: Sequence[Lane],
        recorded: Mapping[str, Array],
        spans: Mapping[str, tuple[str, ...]],
    ) -> Finding:
        """Judge one tap: ``x`` [lane, ...] computed, ``recorded`` and ``spans`` by source."""
        seen = _Seen(self, tap, x, lanes, recorded)
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
        )

    def defined(self, tap: taps.Tap, x: Array) -> Array:
        """Raw scores are defined on the causal triangle only: elsewhere both sides count as zero."""
        if tap.kind.word != "kq":
            return x
        hidden = self.positions[None, :] > self.positions[:, None]
        return np.where(hidden, x.dtype.type(0), x)

    def _drift(self, seen: _Seen) -> metrics.Difference | None:
        """The candidate against the baseline, where both have values; without a candidate, the free run."""
        recorded, every = seen.recorded, self.sources.values()
        alone = "candidate" not in self.sources
        if "baseline" not in recorded or (FREE not in seen.lanes if alone else "candidate" not in recorded):
            return None
        other = seen.lane(FREE, *every) if alone else seen.values("candidate", *every)
        return metrics.difference_of(other, seen.values("baseline", *every))

    def _local(self, source: Source, seen: _Seen, span: tuple[str, ...]) -> tuple[Local, tuple[frozenset[str], ...]]:
        """A source's own error under the arithmetic that fits best, in each phase (prefill, decode); and which fit."""
        tap, lanes = seen.tap, [lane for lane in seen.lanes_of(source) if not lane.shaken]
        values = [seen.lane(lane, source, ranked=True) for lane in lanes]
        recorded = seen.values(source.name, source, ranked=True)
        errors, reference = [right.errors(recorded) for right in values], values[0].reference()
        best = [fit.nearest([error[phase] for error in errors], reference[phase]) for phase in self._phases]
        label = rounding_type(lanes[best[-1]].policy, self._kind(tap), source.stored, source.reading)
        expected = seen.in_phases([lanes[place] for place in best], self._phases, source)
        match = self._match(source, tap, label)
        read = source.reading.get(self._kind(tap))
        label = f"about {read.bits} bits" if read is not None and read.size else label
        per_row, reference = expected.errors(recorded), expected.reference()
        largest, worst = metrics.worst_of(recorded, expected)
        kept = arithmetic.precision(seen.recorded[source.name])
        bounds = Allowance(
            expected, match, lambda: self._noise(source, seen, expected, span, match), kept, self._besides(source, tap)
        )
        verdict = bounds.verdict(per_row, largest, recorded)
        if verdict == limits.MATCH and label in arithmetic.EIGHT_BITS:
            verdict = limits.NOISE
        if verdict == limits.WRONG and span and self._is_unclear(source, seen, per_row, errors):
            verdict = limits.UNCHECKED
        wrong, trusted = verdict == limits.WRONG, source.name == "baseline"
        hiding = bounds.unseen if trusted and verdict == limits.MATCH else bounds.hiding()
        if not trusted and verdict in (limits.MATCH, limits.NOISE):
            least = max(APART * float(per_row.sum()), bounds.whole)
            missed = {lane.policy for lane, error in zip(lanes, errors, strict=True) if error.sum() > least}
            self._note(source, tap, missed, bool(span))
        shape = None
        if wrong:  # rows are the fault's; most values tell which arithmetic it was
            typical = int(np.argmin([_typical_gap(recorded, right) for right in values]))
            shape = self._profile(source, seen, lanes[typical], match)
        found = Local(
            nmse=metrics.ratio(float(per_row.sum()), float(reference.sum())),
            arithmetic=None if wrong else label, limit=match, noise_limit=hiding.whole, verdict=verdict,
            token=worst.token, index=worst.index, expected=worst.baseline, recorded=worst.candidate,
            per_token=tuple(metrics.ratio(float(e), float(r)) for e, r in zip(per_row, reference, strict=True)),
            least=self._least(errors, values[0].reference()), span=span, profile=shape,
            unclear=verdict == limits.UNCHECKED, hides=hiding.whole, hides_row=hiding.row, hides_value=hiding.value,
        )  # fmt: skip
        return found, tuple(
            frozenset(
                lane.policy for lane, error in zip(lanes, errors, strict=True)
                if metrics.ratio(float(error[phase].sum()), float(reference[phase].sum())) <= match
            )
            for phase in self._phases if len(reference[phase])
        )  # fmt: skip

    def _qualified(self, source: Source, seen: _Seen, local: Local) -> Local:
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

    def _profile(self, source: Source, seen: _Seen, lane: Lane, limit: float) -> Profile | None:
        """What the error of the first wrong tap of each kind looks like; the other layers' is most likely the same."""
        tap = seen.tap
        if (source.name, tap.kind.word) in self.described or tap.name in source.trace.known:
            return None
        self.described.add((source.name, tap.kind.word))
        values = (seen.recorded[source.name], seen.x[seen.lanes.index(lane)])
        recorded, expected = (seen.comparable(array, source, ranked=True) for array in values)
        found = profile(tap, recorded, expected, limit, self._look_alikes(source, tap, recorded.size))
        rope = self._rope(tap)
        if rope is not None:
            turned = rotations(recorded, expected, [int(p) for p in self.positions], rope)
            found = replace(found, positions=turned)
        return found

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
        products = {"kq": "cache_k", "kqv": "cache_v", "kqv_out": "cache_v"}
        ops = {"ROPE": ANGLES, "GEGLU": GELU, "GELU": GELU}
        return products.get(tap.kind.word) or ops.get(tap.kind.op) or self.weight_types.get(tap.name, "F32")

    def _match(self, source: Source, tap: taps.Tap, label: str) -> float:
        """The NMSE of right arithmetic, from the table."""
        rule = limits.rule_for(self.rules, tap.name, tap.kind.op, label)
        rope = self._rope(tap)
        match = rule.match + (rule.angle * self.mean_square_angle[rope] if rope is not None else 0.0)
        if source.flash_attn and tap.kind.word == "kqv_out" and source.stored["cache_v"] == "F16":
            # one rounding a key and one of each weight, as in ggml/ops/attention.py; sums grow to their last value
            match += limits.ROUNDING["f16"] * (len(self.positions) + 1)
        return match

    def _besides(self, source: Source, tap: taps.Tap) -> float:
        """What no lane shows: what was read back of the op itself."""
        read = source.reading.get(tap.kind.op)
        return SHAKEN * read.size**2 if read is not None else 0.0

    def _least(self, errors: Sequence[Array], reference: Array) -> float:
        """The NMSE under the arithmetic that has the smallest error in each phase."""
        total = sum(min(float(error[phase].sum()) for error in errors) for phase in self._phases)
        return metrics.ratio(total, float(reference.sum()))

    def _note(self, source: Source, tap: taps.Tap, missed: set[str], in_span: bool) -> None:
        """What a right tap shows of a source's arithmetic: the policies that it cannot have."""
        if missed:
            self.known.add(source.name)
        if not in_span and tap.kind.op.startswith("MUL_MAT"):
            self.shown.setdefault(source.name, {}).setdefault(self._kind(tap), missed).intersection_update(missed)

    def _is_unclear(self, source: Source, seen: _Seen, nearest: Array, errors: Sequence[Array]) -> bool:
        """Whether a span errs as one in unknown arithmetic may: by what 8 bits, or a cache of 4 bits, would do.

        Not where another tap, or a row, has shown which arithmetic the source has. ``nearest`` are the rows' errors
        under the arithmetic that fits best, ``errors`` those under each.
        """
        made = {lane.policy: seen.lane(lane, source, ranked=True) for lane in seen.lanes_of(source)}
        exact = next(iter(made.values()))
        others = [error for error in errors if error is not nearest]
        if source.name in self.known or fit.is_certain(nearest, others, exact.reference(), SURE):
            return False
        rough = [float(made[policy].errors(exact).sum()) for policy in (ROUGH, ROUGH_CACHE) if policy in made]
        return bool(errors[0].sum() <= max(rough, default=0.0))

    def _noise(
        self, source: Source, seen: _Seen, expected: metrics.Rows, span: Sequence[str], match: float
    ) -> list[Sample]:
        """Samples of what rounding makes of one tap of a source.

        A shaken lane shows what the rounding of recorded values makes of the op's result. The lane of an arithmetic
        shows that one's own rounding: another way of doing it differs by a small part of that. Over a span of
        unrecorded ops rounding is chaotic, and may differ by all of it.
        """
        made = {lane.policy: seen.lane(lane, source, ranked=True) for lane in seen.lanes_of(source)}
        exact, samples = next(iter(made.values())), []
        if JITTER in made:
            samples.append(Sample(SHAKEN if source.precision != F32 else SHAKEN_F32, made[JITTER], exact))
        if READ_SHAKEN in made:
            samples.append(Sample(SHAKEN, made[READ_SHAKEN], made[READ]))
        if not span:
            return [*samples, Sample(VARIANT if source.precision == F32 else FLIPPED, expected, exact)]
        shown = self.shown.get(source.name, {}).values()
        never = set.intersection(*shown) if shown else set()  # the arithmetics that no kind of product has
        others = [values for policy, values in made.items() if policy not in (JITTER, ROUGH, ROUGH_CACHE, F32, *never)]
        limit = WHOLE * match + (OWN * 2 * limits.ROUNDING[source.precision] if source.precision != F32 else 0.0)
        rounded = self._rounding_of_span(seen.values(source.name, source, ranked=True), expected, exact, others, limit)
        return samples if rounded is None else [*samples, Sample(SHAKEN, rounded, exact)]

    def _rounding_of_span(
        self,
        recorded: metrics.Rows,
        expected: metrics.Rows,
        exact: metrics.Rows,
        others: Sequence[metrics.Rows],
        limit: float,
    ) -> metrics.Rows | None:
        """The lane whose rounding a span has: the one that fits some rows exactly, or that errs by as much."""
        errors, sizes = expected.errors(recorded), expected.reference()
        spreads = [other.errors(exact) for other in others]
        apart = [lane.errors(recorded) for lane in (exact, *others) if lane is not expected]
        if fit.is_certain(errors, apart, sizes, limit):
            return expected
        alike = fit.alike(float(exact.errors(recorded).sum()), [float(spread.sum()) for spread in spreads])
        return None if alike is None else others[alike]


class _Seen:
    """One tap's arrays as they are compared; each is widened once, however often it is compared."""

    def __init__(
        self, judge: Judge, tap: taps.Tap, x: Array, lanes: Sequence[Lane], recorded: Mapping[str, Array]
    ) -> None:
        self.judge, self.tap, self.x, self.lanes, self.recorded = judge, tap, x, lanes, recorded
        self._rows: dict[Hashable, metrics.Rows] = {}
        self._opened: dict[str, Array | None] = {}

    def lanes_of(self, source: Source) -> list[Lane]:
        return [lane for lane in self.lanes if lane.source == source.name]

    def exact(self, source: Source) -> Lane:
        """The lane of a source that rounds least."""
        return next(lane for lane in self.lanes_of(source) if not lane.shaken)

    def opened(self, source: Source) -> Array | None:
        """Where a tap of a source cannot be judged."""
        if source.name not in self._opened:
            lane = self.exact(source)
            finite = self.lane(lane, source).finite
            right = self.comparable(self.x[self.lanes.index(lane)], source, ranked=False)
            masks = taps.parse(self.tap.name) is None
            self._opened[source.name] = None if finite else open_places(right, masks)
        return self._opened[source.name]

    def in_phases(self, lanes: Sequence[Lane], phases: Sequence[slice], source: Source) -> metrics.Rows:
        """What lanes computed, each in its phase: rows in the order of the tokens."""
        if len(set(lanes)) == 1:
            return self.lane(lanes[0], source, ranked=True)
        parts = sorted(zip(phases, lanes, strict=True), key=lambda part: part[0].start or 0)
        whole = [self.comparable(self.x[self.lanes.index(lane)], source, ranked=True) for _, lane in parts]
        axis = self.tap.row_axis
        rows = [np.moveaxis(x, axis, 0)[phase] for x, (phase, _) in zip(whole, parts, strict=True)]
        return metrics.Rows(np.moveaxis(np.concatenate(rows), 0, axis), axis)

    def lane(self, lane: Lane, *sources: Source, ranked: bool = False) -> metrics.Rows:
        """What a lane computed, where these sources have values."""
        return self._made(lane, self.x[self.lanes.index(lane)], sources, ranked)

    def values(self, name: str, *sources: Source, ranked: bool = False) -> metrics.Rows:
        """What a source recorded, where these sources have values."""
        return self._made(name, self.recorded[name], sources, ranked)

    def _made(self, what: Hashable, x: Array, sources: Sequence[Source], ranked: bool) -> metrics.Rows:
        partial = [source for source in sources if self.tap.name in source.trace.known]
        sorts = self.tap.kind.op == "ARGSORT"
        ranked = ranked and (sorts or any(self.opened(source) is not None for source in sources))
        key = (what, *(source.name for source in (sources if ranked else partial)), ranked)
        if key not in self._rows:
            for source in sources if ranked else partial or (None,):
                x = self.comparable(x, source, ranked)
            self._rows[key] = metrics.Rows(x, self.tap.row_axis)
        return self._rows[key]

    def comparable(self, x: Array, source: Source | None, ranked: bool) -> Array:
        """A tap's defined values, and those that a source knows.

        Chosen experts are ``ranked`` by what was recorded of them: of two that are equal, either may come first. Then
        those that cannot be judged are left out too.
        """
        x = self.judge.defined(self.tap, x)
        if source is None:
            return x
        x = source.known(self.tap.name, x)
        opened = self.opened(source) if ranked else None
        x = x if opened is None else np.where(opened, x.dtype.type(0), x)
        if not ranked or self.tap.kind.op != "ARGSORT":
            return x
        scores = (f"{word}-{self.tap.layer}" for word in self.tap.kind.inputs.split("|"))
        probs = next((name for name in scores if source.is_whole(name)), None)
        return x if probs is None else np.take_along_axis(source.trace[probs], x.astype(np.int64), axis=-1)

    def stats(self, name: str) -> metrics.Stats:
        mask = self.judge.sources[name].trace.known.get(self.tap.name)
        values = self.judge.defined(self.tap, self.recorded[name])
        return metrics.stats(self.values(name) if mask is None else values[mask])

    def distance(self, name: str) -> float:
        """A source's values against the free run's, where it has any."""
        source = self.judge.sources[name]
        return metrics.nmse_of(self.values(name, source), self.lane(FREE, source))

    def at(self, index: tuple[int, ...]) -> dict[str, float]:
        """Every side's value at one place."""
        free = {"engine": self.x[self.lanes.index(FREE)]} if FREE in self.lanes else {}
        sides = {**self.recorded, **free}
        return {name: float(self.judge.defined(self.tap, array)[index]) for name, array in sides.items()}


def _typical_gap(a: metrics.Rows, b: metrics.Rows) -> float:
    """The median distance of two tensors' values."""
    gap = np.abs(a.values - b.values)
    return float(np.median(np.where(np.isnan(gap), np.inf, gap)))
