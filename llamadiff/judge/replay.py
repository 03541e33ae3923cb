"""Teacher-forced replay: run each op on its recorded inputs and compare with its recorded output.

An engine runs its ops in order and shows what each of them gives to a Replay, as ``tap(name, x)``, in every lane. There
it is compared with what a trace has, and the engine goes on with what the trace has: so the next op is computed from
the inputs that the trace's own engine had. A lane without a source goes on with its own values: the free run.

In which lanes is not said here (schedule.py), nor what need not be computed to be compared (``Sketches``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, Protocol

import numpy as np
from llamaref import Tap as EngineTap
from llamaref import ops
from llamaref.config import Rope
from llamaref.sums import Matrices, WeightProduct
from numpy.typing import NDArray

from llamadiff import plugins
from llamadiff.engines.model_file import Runnable
from llamadiff.judge.compared import Compared, Unfollowed
from llamadiff.judge.finding import Finding
from llamadiff.judge.lanes import Lane, Source
from llamadiff.judge.measuring import Judge
from llamadiff.numerics.policies import CACHES, F32, GELU, PERTURBED, perturb
from llamadiff.numerics.rounding_tap import Carrier
from llamadiff.numerics.summing import Kernel
from llamadiff.numerics.transposes import advice
from llamadiff.system.errors import UserError
from llamadiff.trace import taps
from llamadiff.trace.taps import Tap

Array = NDArray[Any]
# the ops in which a token's row depends on other tokens' rows
MIXING = ("kq", "kq_soft_max", "kqv", "kqv_out", "ssm_conv", "ssm_scan")


class ShownSums(Protocol):
    """Keeps the last product in mind until its tap is seen, which may show how it was added."""

    def record_sum(
        self, lanes: Sequence[Lane], kind: str, shape: tuple[int, ...], kernel: Kernel, parts: Matrices
    ) -> None:
        """A product was added in float32."""

    def orders_shown(self, tap: Tap, x: Array, lanes: Sequence[Lane], recorded: Mapping[str, Array]) -> frozenset[str]:
        """The ways in which the last product may have been added, if the tap is that product."""


class Sketches(Protocol):
    """Products of many tokens that are seen to be right before they are computed, so that they need not be."""

    def verified_product(
        self, product: WeightProduct, lanes: Sequence[Lane], taps: Mapping[str, Tap],
        recorded: Callable[[Source, Tap, tuple[int, ...]], Array],
    ) -> Array | None:  # fmt: skip
        """What was recorded of a product, in each lane, if all of it clearly is right."""

    def finding_of(
        self, tap: Tap, x: Array, lanes: Sequence[Lane], spans: Mapping[str, tuple[str, ...]]
    ) -> Finding | None:
        """That of a tap whose product was known; else None."""


class Replay(EngineTap):
    """Teacher-forced replay: a llamaref.Tap that has every op judged, a Finding for each in their order.

    ``carrier`` rounds as the present ``lanes`` do; ``logits`` are the first lane's.
    """

    def __init__(
        self,
        judge: Judge,
        lanes: Sequence[Lane],
        model: Runnable,
        keep: Callable[[str, Array], None] = lambda name, x: None,
    ) -> None:
        """``keep(name, x)`` receives the first lane's taps."""
        self.judge, self.sources, self.keep = judge, judge.sources, keep
        self.present = {tap.name: tap for tap in model.taps}
        self.n_expert = model.sizes["expert"]
        self.spans = {name: Spans(source, model) for name, source in self.sources.items()}
        self.sums = plugins.ask_first(lambda each: each.sum_order_probe(judge))
        self.sketches = plugins.ask_first(lambda each: each.sketches(judge, model.products))
        self.findings: list[Finding] = []
        self.logits: Array | None = None
        self._mean_square_angle: dict[Rope, float] = {}
        self.carry(lanes)

    def carry(self, lanes: Sequence[Lane]) -> None:
        """Go on with these lanes."""
        self.lanes = tuple(lanes)
        reading = next((source.reading for source in self.sources.values() if source.reading), None)
        ways = [(lane.policy, lane.cache_types(self.sources)) for lane in lanes]
        self.carrier = Carrier(ways, reading, self.judge.edges)
        self._last_operands: tuple[tuple[Any, ...], tuple[Array, ...]] = ((), ())

    @property
    def ways(self) -> Sequence[tuple[str, Mapping[str, str]]]:
        """Each lane's policy, and the types of its cache: an engine of ggml's ops computes them as ggml does."""
        return self.carrier.ways

    def __call__(self, name: str, x: Array) -> Array:
        """An op's result ``x`` [lane, token, ...], computed from each lane's inputs -> what they go on with."""
        tap = self.present.get(name)
        if tap is None:
            raise UserError(f"the engine has a tap {name} that the vocabulary does not list")
        if len(x) != len(self.lanes):  # the embedding: one run becomes a run a lane
            x = np.broadcast_to(x, (len(self.lanes), *x.shape[1:]))
        self.keep(name, x[0])
        if name == taps.LOGITS:
            self.logits = x[0]
        spans = {source: each.before(name) for source, each in self.spans.items()}
        recorded = {
            source.name: self.recorded_values(source, tap, x.shape[1:])
            for source in self.sources.values()
            if name in source.trace
        }
        seen = self.sketches.finding_of(tap, x, self.lanes, spans) if self.sketches is not None else None
        if seen is not None:
            self.findings.append(seen)
            return x  # which is what was recorded
        sums = self.sums.orders_shown(tap, x, self.lanes, recorded) if self.sums is not None else frozenset()
        lost = {self.lanes[number]: nmse for number, nmse in self.carrier.take_lost().items()}
        unfollowed = Unfollowed(lost, self._mean_square_angle)
        compared = Compared(tap, [*x], self.lanes, recorded, self.sources, self.judge.positions, unfollowed=unfollowed)
        self.findings.append(self.judge.measure_tap(compared, spans, self.findings, sums))
        return self._teacher_forced(name, x, recorded)

    def recorded_values(self, source: Source, tap: Tap, shape: tuple[int, ...]) -> Array:
        """What a trace has of a tap, in the engine's shape."""
        values = source.trace[tap.name]
        same_rows = values.ndim > tap.row_axis and values.shape[: tap.row_axis + 1] == shape[: tap.row_axis + 1]
        if not same_rows or values.size != prod(shape):
            raise UserError(
                f"{tap.name} of the {source.name} has shape {list(values.shape)}; this model and these tokens need "
                f"{list(shape)} ({', '.join(tap.kind.axes)}){advice(values.shape, shape)}"
            )
        if tap.kind.op == "ARGSORT":
            return self._expert_numbers(source, tap, values).reshape(shape)
        return values.reshape(shape)

    def _teacher_forced(self, name: str, x: Array, recorded: Mapping[str, Array]) -> Array:
        """What the engine goes on with: the sources' own values in their lanes, where they have any."""
        if not recorded and not any(lane.is_noise_probe for lane in self.lanes):
            return x
        if recorded and len(self.lanes) == 1 and self.sources[str(self.lanes[0].source)].is_whole(name):
            return recorded[str(self.lanes[0].source)][None].astype(x.dtype, copy=False)
        out = np.empty_like(x)
        for number, lane in enumerate(self.lanes):
            values = x[number]
            if lane.source is not None and lane.source in recorded:
                own, rows = recorded[lane.source], self.sources[lane.source].whole_rows(name)
                values = own if rows is None else np.where(_along_first(rows, own), own, values)
            if lane.policy in PERTURBED and lane.source is not None:
                values = perturb(values, self.sources[lane.source].shown_in(name), PERTURBED.index(lane.policy))
            out[number] = values
        return out

    def _expert_numbers(self, source: Source, tap: Tap, values: Array) -> Array:
        """Expert numbers as an index array. Raises UserError for one that is out of range."""
        with np.errstate(invalid="ignore"):
            numbers = np.asarray(values).astype(np.int32)
        bad = (numbers != values) | (numbers < 0) | (numbers >= self.n_expert)
        if bad.any():
            found = np.asarray(values)[bad].flat[0]
            raise UserError(
                f"{tap.name} of the {source.name}: expert index {found} is out of range 0..{self.n_expert - 1}"
            )
        return numbers

    # -- how an op is computed: as each lane's arithmetic does ---------------------------------------------------------

    def is_wanted(self, name: str) -> bool:
        """Whether a trace has a tap; if none does, what comes after it answers for it."""
        return any(name in source.trace for source in self.sources.values())

    def operands(self, kind: str, *arrays: Array) -> tuple[Array, ...]:
        """As the lanes round them, and perturbed where these are; what several products read in turn, once."""
        asked, operands = self._last_operands
        if len(asked) != 1 + len(arrays) or any(a is not b for a, b in zip(asked, (kind, *arrays), strict=True)):
            operands = self.carrier.operands(kind, *arrays)
            if kind not in (*CACHES, GELU):
                operands = (self.product(operands[0]), *operands[1:])
            self._last_operands = ((kind, *arrays), operands)
        return operands

    def store(self, kind: str, x: Array) -> Array:
        return self.carrier.store(kind, x)

    def multiply(self, product: WeightProduct) -> Array:
        sketches = self.sketches
        known = (
            sketches.verified_product(product, self.lanes, self.present, self.recorded_values)
            if sketches is not None
            else None
        )
        return product.compute() if known is None else known

    def accumulate(self, y: Array, kind: str, parts: Matrices, start: int = 0, by_row: bool = False) -> Array:
        if self.sums is not None:
            self.sums.record_sum(self.lanes, kind, y.shape[1:], self.carrier.kernel("", kind, start, by_row), parts)
        return self.carrier.accumulate(y, kind, parts, start, by_row)

    def product(self, y: Array) -> Array:
        """Perturbed in the lanes of an engine that keeps its products in 16 bits, and its weights perhaps too.

        A product before its bias is added; and its operand, which moves a product as rounded weights do.
        """
        kept = [self.sources[lane.source].products if lane.source else F32 for lane in self.lanes]
        if not any(lane.policy in PERTURBED and kind != F32 for lane, kind in zip(self.lanes, kept, strict=True)):
            return y
        y = self.carrier.widen(y)
        for number, (lane, kind) in enumerate(zip(self.lanes, kept, strict=True)):
            if lane.policy in PERTURBED:
                y[number] = perturb(y[number], kind, PERTURBED.index(lane.policy))
        return y

    def angles(
        self, cos: Array, sin: Array, rope: Rope, positions: Array, factors: Array | None
    ) -> tuple[Array, Array]:
        self._mean_square_angle[rope] = float(np.mean(ops.rope_theta(rope, positions, factors) ** 2))
        return self.carrier.angles(cos, sin, rope, positions, factors)


class Spans:
    """Which unrecorded taps each tap of a source answers for: those between it and the recorded ones before it."""

    def __init__(self, source: Source, model: Runnable) -> None:
        self._source, self._inputs = source, model.inputs
        self._present = {tap.name: tap for tap in model.taps}
        self._before: dict[str, tuple[str, ...]] = {}

    def before(self, name: str) -> tuple[str, ...]:
        """Those of one tap, by name."""
        if name not in self._before:
            tap = self._present[name]
            wanted = None if tap.kind.word in MIXING else self._source.rows_with_values(name)
            open_inputs = (each for each in self._inputs(tap) if not _has_rows(self._source, each, wanted))
            self._before[name] = tuple(dict.fromkeys(opened for each in open_inputs for opened in self._up_to(each)))
        return self._before[name]

    def _up_to(self, name: str) -> tuple[str, ...]:
        """Those that a tap leaves to the next one, itself included."""
        if name not in self._present or self._source.is_whole(name):
            return ()
        return self.before(name) if self._present[name].kind.optional else (*self.before(name), name)


def _along_first(rows: Array, values: Array) -> Array:
    """Flags of rows, to be broadcast against a tap whose first axis runs over tokens."""
    return rows.reshape(-1, *[1] * (values.ndim - 1))


def _has_rows(source: Source, name: str, wanted: Array | None) -> bool:
    """Whether a partial tap has all the rows that a partial tap after it needs."""
    rows = source.whole_rows(name)
    return rows is not None and wanted is not None and bool((rows | ~wanted).all())
