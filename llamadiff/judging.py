"""The judge: one tap's lanes against what the traces recorded, and what of the difference is rounding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from llamaref.config import Rope
from numpy.typing import NDArray

from llamadiff import arithmetic, limits, metrics, taps
from llamadiff.lanes import ANGLES, F32, FREE, FREE_NATIVE, GELU, JITTER, Lane, Source, rounding_type
from llamadiff.profile import Profile, profile, rotations

Array = NDArray[Any]
MOST = 200  # look-alikes that are compared


@dataclass(frozen=True)
class Local:
    """A recorded tap against what the engine computes from the same trace's inputs.

    ``arithmetic`` is the one that fits (None where none does). ``expected`` and ``recorded`` are the two values
    at ``index``, where they differ most. ``span`` names the unrecorded taps this one answers for as well.
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


@dataclass(frozen=True)
class Finding:
    """All that a pass found out about one tap."""

    tap: taps.Tap
    shape: tuple[int, ...]
    local: Mapping[str, Local]  # by source
    stats: Mapping[str, metrics.Stats]  # by source, and "engine" for the free run
    drift: metrics.Difference | None  # candidate (or the free run) against the baseline
    noise: float | None  # what the baseline's arithmetic alone does to a free run
    at: Mapping[str, Mapping[str, float]]  # by source: every side's value where that source's local error is largest
    distance: Mapping[str, float]  # by source: NMSE against the free run, which computes in float32 throughout


@dataclass
class Judge:
    """The facts of one run that every tap is judged by.

    ``weight_types``: tap name -> type of the weight it multiplies by; ``ropes`` of the layers, and
    ``mean_square_angle`` of each of them, radians.
    """

    sources: Mapping[str, Source]
    lanes: Sequence[Lane]
    weight_types: Mapping[str, str]
    rules: Sequence[limits.Rule]
    positions: Array
    n_prefill: int
    ropes: Sequence[Rope | None]
    mean_square_angle: dict[Rope, float] = field(default_factory=dict)
    described: set[tuple[str, str]] = field(default_factory=set)

    def finding(
        self, tap: taps.Tap, x: Array, recorded: Mapping[str, Array], spans: Mapping[str, tuple[str, ...]]
    ) -> Finding:
        """Judge one tap: ``x`` [lane, ...] computed, ``recorded`` and ``spans`` by source."""
        free, axis = self._defined(tap, x[0]), tap.row_axis
        values = {name: self._defined(tap, array) for name, array in recorded.items()}
        local = {name: self._local(self.sources[name], tap, x, array, spans[name]) for name, array in values.items()}
        sides = {**values, "engine": free}
        return Finding(
            tap=tap,
            shape=tuple(x.shape[1:]),
            local=local,
            at={
                name: {side: float(array[found.index]) for side, array in sides.items()}
                for name, found in local.items()
            },
            stats={
                **{name: self._stats(tap, name, array) for name, array in values.items()},
                "engine": metrics.stats(free),
            },
            drift=self._drift(tap, values, free),
            distance={name: self._distance(tap, name, array, free) for name, array in values.items()},
            noise=self._between(tap, x, FREE_NATIVE, FREE, axis) if FREE_NATIVE in self.lanes else None,
        )

    def _defined(self, tap: taps.Tap, x: Array) -> Array:
        """Raw scores are defined on the causal triangle only: elsewhere both sides count as zero."""
        if tap.kind.word != "kq":
            return x
        hidden = self.positions[None, :] > self.positions[:, None]
        return np.where(hidden, x.dtype.type(0), x)

    def _stats(self, tap: taps.Tap, name: str, x: Array) -> metrics.Stats:
        mask = self.sources[name].trace.known.get(tap.name)
        return metrics.stats(x if mask is None else x[mask])

    def _drift(self, tap: taps.Tap, values: Mapping[str, Array], free: Array) -> metrics.Difference | None:
        """The candidate against the baseline, where both have values; without a candidate, the free run."""
        candidate = values.get("candidate") if "candidate" in self.sources else free
        baseline = values.get("baseline")
        if candidate is None or baseline is None:
            return None
        for source in self.sources.values():
            candidate, baseline = source.known(tap.name, candidate), source.known(tap.name, baseline)
        return metrics.difference(candidate, baseline, tap.row_axis)

    def _distance(self, tap: taps.Tap, name: str, values: Array, free: Array) -> float:
        source = self.sources[name]
        return metrics.nmse(source.known(tap.name, values), source.known(tap.name, free), tap.row_axis)

    def _between(self, tap: taps.Tap, x: Array, lane: Lane, other: Lane, axis: int) -> float:
        a, b = (self._defined(tap, x[self.lanes.index(which)]) for which in (lane, other))
        return metrics.nmse(a, b, axis)

    def _local(self, source: Source, tap: taps.Tap, x: Array, recorded: Array, span: tuple[str, ...]) -> Local:
        """The smallest error over the source's lanes, each phase (prefill, decode) for itself."""
        lanes = [lane for lane in source.lanes if lane.policy != JITTER]
        expected = [self._comparable(source, tap, x[self.lanes.index(lane)]) for lane in lanes]
        recorded = self._comparable(source, tap, recorded)
        pairs = [metrics.row_errors(recorded, values, tap.row_axis) for values in expected]
        errors, reference = [error for error, _ in pairs], pairs[0][1]
        per_row, best = self._best(errors)
        nmse = metrics.ratio(float(per_row.sum()), float(reference.sum()))
        label = rounding_type(lanes[best].policy, self._kind(tap), source.stored)
        match, noise = self._limits(source, tap, label, recorded, x, span)
        verdict = limits.verdict(nmse, match, noise)
        if verdict == limits.WRONG:  # the sum is the fault's; most values tell which arithmetic it was
            best = int(np.argmin([_typical_gap(recorded, values) for values in expected]))
        worst = metrics.difference(recorded, expected[best], tap.row_axis).worst
        per_token = tuple(metrics.ratio(float(e), float(r)) for e, r in zip(per_row, reference, strict=True))
        wrong = verdict == limits.WRONG
        shape = self._profile(source, tap, recorded, expected[best], match) if wrong else None
        return Local(nmse, None if wrong else label, match, noise, verdict, worst.token, worst.index,
                     worst.baseline, worst.candidate, per_token, span, shape)  # fmt: skip

    def _profile(self, source: Source, tap: taps.Tap, recorded: Array, expected: Array, limit: float) -> Profile | None:
        """What the error of the first wrong tap of each kind looks like; the other layers' is most likely the same."""
        if (source.name, tap.kind.word) in self.described or tap.name in source.trace.known:
            return None
        self.described.add((source.name, tap.kind.word))
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

    def _best(self, errors: Sequence[Array]) -> tuple[Array, int]:
        """Each row's error under the lane that fits its phase best, and the lane of the prefill."""
        per_row, first = np.empty_like(errors[0]), 0
        for phase in (slice(self.n_prefill, None), slice(0, self.n_prefill)):
            if len(per_row[phase]):
                first = int(np.argmin([error[phase].sum() for error in errors]))
                per_row[phase] = errors[first][phase]
        return per_row, first

    def _comparable(self, source: Source, tap: taps.Tap, x: Array) -> Array:
        """What is compared of a tap: its defined and known values.

        Chosen experts are compared by what was recorded of them: of two that are equal, either may come first.
        """
        x = source.known(tap.name, self._defined(tap, x))
        if tap.kind.op != "ARGSORT":
            return x
        scores = (f"{word}-{tap.layer}" for word in tap.kind.inputs.split("|"))
        probs = next((name for name in scores if source.is_whole(name)), None)
        if probs is None:
            return x
        return np.take_along_axis(source.trace[probs], x.astype(np.int64), axis=-1)

    def _kind(self, tap: taps.Tap) -> str:
        products = {"kq": "cache_k", "kqv": "cache_v", "kqv_out": "cache_v"}
        ops = {"ROPE": ANGLES, "GEGLU": GELU, "GELU": GELU}
        return products.get(tap.kind.word) or ops.get(tap.kind.op) or self.weight_types.get(tap.name, "F32")

    def _limits(
        self, source: Source, tap: taps.Tap, label: str, recorded: Array, x: Array, span: Sequence[str]
    ) -> tuple[float, float]:
        """The match and the noise limit of one tap: the table's, widened by what is known of this tap.

        A value kept in 16 bits carries its rounding, and the shaken lane measures what that of the op's inputs
        makes of its result. Over a span of unrecorded ops rounding is chaotic, and the distance between the lanes'
        arithmetics measures it.
        """
        rule = limits.rule_for(self.rules, tap.name, tap.kind.op, label)
        rope = self._rope(tap)
        match = rule.match + (rule.angle * self.mean_square_angle[rope] if rope is not None else 0.0)
        noise = max(10 * match, 16 * limits.ROUNDING[arithmetic.precision(recorded)])
        if source.flash_attn and tap.kind.word == "kqv_out" and source.stored["cache_v"] == "F16":
            # ggml sums such values in float16, one rounding a key (ggml-cpu/ops.cpp, flash_attn_ext)
            noise += 4 * limits.ROUNDING["f16"] * len(self.positions)
        if span or source.precision != F32:
            first, *others = [self._comparable(source, tap, x[self.lanes.index(lane)]) for lane in source.lanes]
            spreads = [metrics.nmse(other, first, tap.row_axis) for other in others]
            noise += 4 * max((spread for spread in spreads if np.isfinite(spread)), default=0.0)  # float16 may overflow
        return match, noise


def _typical_gap(a: Array, b: Array) -> float:
    """The median distance of two tensors' values."""
    gap = np.abs(np.subtract(a, b, dtype=np.float64))
    return float(np.median(np.where(np.isnan(gap), np.inf, gap)))
