"""The study of one forward pass: one engine run in which every lane answers one question.

A lane is a source of values and an arithmetic. Without a source it runs free. With a trace as its source it
takes every recorded tap from the trace, so what it computes next is judged on the inputs that the trace's own
engine really had. All lanes share the batch axis of the engine, hence one pass over the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from llamaref import ops
from llamaref.config import Rope
from numpy.typing import NDArray

from llamadiff import arithmetic, limits, metrics, taps
from llamadiff.errors import UserError
from llamadiff.trace import Trace

Array = NDArray[Any]

F32, NATIVE, F16, BF16 = "f32", "native", "f16", "bf16"
POLICIES = (F32, NATIVE, F16, BF16)
ANGLES, GGML_ANGLES = "angles", "ggml angles"


@dataclass(frozen=True)
class Lane:
    """A source (None: free-running) and an arithmetic policy."""

    source: str | None
    policy: str


@dataclass(frozen=True)
class Local:
    """A recorded tap against what the engine computes from the same trace's inputs.

    ``expected`` and ``recorded`` are the two values at ``index``, where they differ most. ``span`` names the
    unrecorded taps this one answers for as well.
    """

    nmse: float
    arithmetic: str
    limit: float
    noise_limit: float
    verdict: str
    token: int | None
    index: tuple[int, ...]
    expected: float
    recorded: float
    per_token: tuple[float, ...]
    span: tuple[str, ...]


@dataclass(frozen=True)
class Finding:
    """All that the pass found out about one tap."""

    tap: taps.Tap
    shape: tuple[int, ...]
    local: Mapping[str, Local]  # by source
    stats: Mapping[str, metrics.Stats]  # by source, and "engine" for the free run
    drift: metrics.Difference | None  # candidate (or the free run) against the baseline
    engine_drift: float | None  # the free run against the baseline
    noise: float | None  # what the baseline's arithmetic alone does to a free run


@dataclass
class Source:
    """A trace under replay: its arithmetics, the types of its cache, and the taps it left open (unrecorded)."""

    name: str
    trace: Trace
    policies: Sequence[str]
    stored: Mapping[str, str]  # cache_k, cache_v -> type
    flash_attn: bool = False
    spans: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, trace: Trace, weight_types: Iterable[str], policies: Sequence[str]) -> Source:
        """A trace with what its producer says of its settings."""
        stored = stored_types(trace)
        settings = trace.info.producer.get("settings")
        flash = isinstance(settings, dict) and bool(settings.get("flash_attn"))
        return cls(name, trace, policies_for(weight_types, stored, policies), stored, flash)


def stored_types(trace: Trace) -> dict[str, str]:
    """The types that K and V rows have in the cache of a trace's producer; float32 unless it says otherwise.

    llama.cpp's flash attention casts a float32 cache to float16 (llama-graph.cpp, build_attn_mha).
    """
    settings = trace.info.producer.get("settings")
    settings = settings if isinstance(settings, dict) else {}
    types = {f"cache_{side}": str(settings.get(f"type_{side}", "F32")).upper() for side in "kv"}
    return {side: "F16" if settings.get("flash_attn") and kind == "F32" else kind for side, kind in types.items()}


def policies_for(kinds: Iterable[str], stored: Mapping[str, str], wanted: Sequence[str]) -> list[str]:
    """The wanted policies that differ from one another on these weight types."""
    kept: dict[tuple[str, ...], str] = {}
    kinds = [*sorted(kinds), ANGLES]
    for policy in wanted:
        signature = tuple(rounding_type(policy, kind, stored) for kind in [*kinds, *stored])
        kept.setdefault(signature, policy)
    return list(kept.values())


def rounding_type(policy: str, kind: str, stored: Mapping[str, str]) -> str:
    """The type that activations are rounded to before a product with weights (or a cache) of type ``kind``."""
    if kind == ANGLES:
        return GGML_ANGLES if policy == NATIVE else "F32"
    if policy == NATIVE:
        to = arithmetic.PARTNER.get(stored.get(kind, kind), "F32")
        return "F32" if kind == "cache_v" and to not in ("F16", "BF16") else to  # quantized V is dequantized
    return policy.upper()


class Study:
    """The tap of a study: holds the lanes, judges, and collects a Finding for every tap (llamaref.Tap)."""

    def __init__(
        self,
        sources: Sequence[Source],
        present: Sequence[taps.Tap],
        weight_types: Mapping[str, str],
        n_layer: int,
        rules: Sequence[limits.Rule],
        positions: Sequence[int],
        n_prefill: int,
        keep: Any = None,
    ) -> None:
        """``weight_types``: tap name -> type of the weight it multiplies by. ``keep(name, array)`` receives the
        free run's taps, if it is given."""
        self.sources = {source.name: source for source in sources}
        self.present = {tap.name: tap for tap in present}
        self.weight_types = weight_types
        self.n_layer = n_layer
        self.rules = rules
        self.positions = np.asarray(positions)
        self.phases = [slice(0, n_prefill), slice(n_prefill, len(positions))]
        self.keep = keep
        self.mean_square_angle = 0.0
        self.free_logits: Array | None = None
        self.findings: list[Finding] = []
        free = self.sources["baseline"].stored if "baseline" in self.sources else {}
        self.free_stored = free
        self.lanes = [Lane(None, F32)]
        if NATIVE in policies_for(set(weight_types.values()), free, (F32, NATIVE)):
            self.lanes.append(Lane(None, NATIVE))
        for source in sources:
            self.lanes += [Lane(source.name, policy) for policy in source.policies]

    # -- the engine's side -------------------------------------------------------------------------

    def __call__(self, name: str, x: Array) -> Array:
        tap = self.present.get(name)
        if tap is None:
            raise UserError(f"the engine has a tap {name} that the vocabulary does not list")
        if x.shape[0] != len(self.lanes):  # the embedding: one run becomes a run a lane
            x = np.broadcast_to(x, (len(self.lanes), *x.shape[1:]))
        x = x.copy()
        if self.keep is not None:
            self.keep(name, x[0])
        if name == "result_output":
            self.free_logits = x[0].copy()
        spans = {source.name: self._opened(source, tap) for source in self.sources.values()}
        recorded = {source.name: self._recorded(source, tap, x.shape[1:]) for source in self.sources.values()}
        self.findings.append(self._judge(tap, x, recorded, spans))
        for number, lane in enumerate(self.lanes):
            values = recorded.get(lane.source or "")
            if values is not None:
                x[number] = values
        return x

    def operands(self, kind: str, *arrays: Array) -> tuple[Array, ...]:
        out = [array if array.dtype.kind == "i" else np.array(array) for array in arrays]
        sums = None
        for number, lane in enumerate(self.lanes):
            to = rounding_type(lane.policy, kind, self._stored(lane))
            if to == "Q8_1":
                sums = np.zeros((*out[0].shape[:-1], out[0].shape[-1] // 32), out[0].dtype) if sums is None else sums
                sums[number] = arithmetic.q8_1_sums(out[0][number])
            for array in out:
                if array.dtype.kind != "i" and to in arithmetic.ROUNDINGS:
                    array[number] = arithmetic.ROUNDINGS[to](array[number])
        return (*out, sums) if sums is not None else tuple(out)

    def stored(self, kind: str, x: Array) -> Array:
        x = np.array(x)
        for number, lane in enumerate(self.lanes):
            to = self._stored(lane).get(kind, "F32") if lane != Lane(None, F32) else "F32"
            if to in arithmetic.ROUNDINGS:
                x[number] = arithmetic.ROUNDINGS[to](x[number])
        return x

    def angles(
        self, cos: Array, sin: Array, rope: Rope, positions: Array, factors: Array | None
    ) -> tuple[Array, Array]:
        self.mean_square_angle = float(np.mean(ops.rope_theta(rope, positions, factors) ** 2))
        exact, rounded = (cos, sin), arithmetic.ggml_angles(rope, positions, factors)
        chosen = [rounded if lane.policy == NATIVE else exact for lane in self.lanes]
        return np.stack([c for c, _ in chosen]), np.stack([s for _, s in chosen])

    def _stored(self, lane: Lane) -> Mapping[str, str]:
        return self.free_stored if lane.source is None else self.sources[lane.source].stored

    # -- the judge's side --------------------------------------------------------------------------

    def _opened(self, source: Source, tap: taps.Tap) -> tuple[str, ...]:
        """The unrecorded taps that lie between this one and the recorded ones before it."""
        inputs = taps.inputs_of(tap, self.present, self.n_layer)
        opened = tuple(dict.fromkeys(name for i in inputs for name in source.spans.get(i, ())))
        if tap.name not in source.trace:
            source.spans[tap.name] = (*opened, tap.name)
        return opened

    def _recorded(self, source: Source, tap: taps.Tap, shape: tuple[int, ...]) -> Array | None:
        """The trace's values in the engine's shape; None if it has no such tap."""
        name = tap.name
        if name not in source.trace:
            return None
        values = source.trace[name]
        same_rows = values.ndim > tap.row_axis and values.shape[: tap.row_axis + 1] == shape[: tap.row_axis + 1]
        if not same_rows or values.size != int(np.prod(shape)):
            raise UserError(
                f"{name} of the {source.name} has shape {list(values.shape)}; this model and these tokens need "
                f"{list(shape)} ({', '.join(tap.kind.axes)})"
            )
        return values.reshape(shape)

    def _judge(
        self, tap: taps.Tap, x: Array, recorded: Mapping[str, Array | None], spans: Mapping[str, tuple[str, ...]]
    ) -> Finding:
        values = {name: self._defined(tap, array) for name, array in recorded.items() if array is not None}
        free = self._defined(tap, x[0])
        baseline = values.get("baseline")
        candidate = values.get("candidate") if "candidate" in self.sources else free
        return Finding(
            tap=tap,
            shape=tuple(x.shape[1:]),
            local={name: self._local(self.sources[name], tap, x, array, spans[name]) for name, array in values.items()},
            stats={**{name: metrics.stats(array) for name, array in values.items()}, "engine": metrics.stats(free)},
            drift=_difference(candidate, baseline, tap.row_axis),
            engine_drift=None if baseline is None else metrics.nmse(free, baseline, tap.row_axis),
            noise=self._noise(tap, x),
        )

    def _defined(self, tap: taps.Tap, x: Array) -> Array:
        """Raw scores are defined on the causal triangle only: elsewhere both sides count as zero."""
        if tap.kind.word != "kq":
            return x
        hidden = self.positions[None, :] > self.positions[:, None]
        return np.where(hidden, x.dtype.type(0), x)

    def _noise(self, tap: taps.Tap, x: Array) -> float | None:
        if Lane(None, NATIVE) not in self.lanes:
            return None
        rounded = x[self.lanes.index(Lane(None, NATIVE))]
        return metrics.nmse(self._defined(tap, rounded), self._defined(tap, x[0]), tap.row_axis)

    def _local(self, source: Source, tap: taps.Tap, x: Array, recorded: Array, span: tuple[str, ...]) -> Local:
        """The smallest error over the source's lanes, each phase (prefill, decode) for itself."""
        numbers = [n for n, lane in enumerate(self.lanes) if lane.source == source.name]
        errors, reference = [], np.zeros(0)
        for number in numbers:
            error, reference = metrics.row_errors(recorded, self._defined(tap, x[number]), tap.row_axis)
            errors.append(error)
        per_row = np.empty_like(reference)
        best = numbers[0]
        for phase in reversed(self.phases):
            if len(per_row[phase]):
                choice = int(np.argmin([error[phase].sum() for error in errors]))
                per_row[phase], best = errors[choice][phase], numbers[choice]
        nmse = metrics.ratio(float(per_row.sum()), float(reference.sum()))
        expected = self._defined(tap, x[best])
        worst = metrics.difference(recorded, expected, tap.row_axis).worst
        label = rounding_type(self.lanes[best].policy, self._kind(tap), source.stored)
        match, noise = self._limits(source, tap, label, recorded, x[numbers], span)
        per_token = tuple(metrics.ratio(float(e), float(r)) for e, r in zip(per_row, reference, strict=True))
        verdict = limits.verdict(nmse, match, noise)
        return Local(nmse, label, match, noise, verdict, worst.token, worst.index, worst.baseline, worst.candidate,
                     per_token, span)  # fmt: skip

    def _kind(self, tap: taps.Tap) -> str:
        special = {"kq": "cache_k", "kqv_out": "cache_v", "Qcur_rope": ANGLES, "Kcur_rope": ANGLES}
        return special.get(tap.kind.word) or self.weight_types.get(tap.name, "F32")

    def _limits(
        self, source: Source, tap: taps.Tap, label: str, recorded: Array, lanes: Array, span: Sequence[str]
    ) -> tuple[float, float]:
        """The match and the noise limit of one tap: the table's, widened by what is known of this tap.

        A value kept in 16 bits carries its rounding. Over a span of unrecorded ops rounding is chaotic, and the
        distance between the lanes' arithmetics measures it.
        """
        rule = limits.rule_for(self.rules, tap.name, tap.kind.op, label)
        match = rule.match + rule.angle * self.mean_square_angle
        if match == 0:  # whole numbers are right or wrong
            return 0.0, 0.0
        noise = max(10 * match, 16 * limits.ROUNDING[arithmetic.precision(recorded)])
        if source.flash_attn and tap.kind.word == "kqv_out" and source.stored["cache_v"] == "F16":
            # ggml sums such values in float16, one rounding a key (ggml-cpu/ops.cpp, flash_attn_ext)
            noise += 4 * limits.ROUNDING["f16"] * len(self.positions)
        if span:
            spread = max(
                metrics.nmse(self._defined(tap, lane), self._defined(tap, lanes[0]), tap.row_axis) for lane in lanes
            )
            noise += 4 * spread
        return match, noise


def _difference(candidate: Array | None, baseline: Array | None, axis: int) -> metrics.Difference | None:
    return None if candidate is None or baseline is None else metrics.difference(candidate, baseline, axis)
