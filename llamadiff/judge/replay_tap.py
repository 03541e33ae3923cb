"""The tap of a replay: it carries all lanes through one forward pass and has every tap judged.

A source's arithmetic is not known at first: its lanes try every legal one. Once a layer has shown which fit, the
others are left out of the layers after it, and a layer that does not fit is run again with all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from math import prod
from typing import Any

import numpy as np
from llamaref import ops
from llamaref.config import Rope
from llamaref.sums import Matrices
from llamaref.weight_product import WeightProduct
from numpy.typing import NDArray

from llamadiff.engines.model_file import Runnable
from llamadiff.judge.by_sketch import Sketched, Sketching
from llamadiff.judge.coverage import LEAST
from llamadiff.judge.finding import Finding
from llamadiff.judge.lanes import FREE, FREE_NATIVE, Lane, Source, policies_for
from llamadiff.judge.tap_verdict import Judge
from llamadiff.numerics import half_sums, metrics, tolerances
from llamadiff.numerics.combinations import Combinations
from llamadiff.numerics.policies import CACHES, F32, GELU, JITTERS, NATIVE, READ, READ_SHAKEN, rounding_type, shaken
from llamadiff.numerics.rounding_tap import RoundedOnce
from llamadiff.numerics.transposes import advice
from llamadiff.system.errors import UserError
from llamadiff.trace import taps

Array = NDArray[Any]
# the ops in which a token's row depends on other tokens' rows
MIXING = ("kq", "kq_soft_max", "kqv", "kqv_out", "ssm_conv", "ssm_scan")


@dataclass(frozen=True)
class _Given:
    """What the engine was given for a product: ``values`` [lane, ...], of which each source's ``rows`` were
    ``sketched``.
    """

    values: Array
    sketched: Mapping[str, Sketched]
    rows: Mapping[str, metrics.Rows]


@dataclass(frozen=True)
class _Added:
    """A product of float16's numbers in a lane: its shape, and what it consists of."""

    number: int
    shape: tuple[int, ...]
    kernel: half_sums.Kernel
    parts: Matrices


class Study(RoundedOnce):
    """A llamaref.Tap: holds the lanes and collects a Finding for every tap."""

    def __init__(
        self,
        judge: Judge,
        lanes: Sequence[Lane],
        model: Runnable,
        keep: Callable[[str, Array], None] = lambda name, x: None,
        first: Sequence[Lane] | None = None,
    ) -> None:
        """``keep(name, x)`` receives the first lane's taps.

        ``first``: the lanes of the first layer; those that are likely, unless they are given.
        """
        self.judge, self.sources, self.every = judge, judge.sources, tuple(lanes)
        self.present = {tap.name: tap for tap in model.taps}
        self.inputs, self.n_expert, self.products = model.inputs, model.sizes["expert"], model.products
        self.keep = keep
        self.combinations = Combinations.within(judge.phases, len(judge.positions))
        self._sketched: dict[str, _Given] = {}  # by tap
        self.findings: list[Finding] = []
        self.free_logits: Array | None = None
        self.to_begin = first
        self._carry(self.every)
        self._tried: set[tuple[str, str]] = set()  # sources and words for which the present layer is run again
        self._excused: set[tuple[str, str]] = set()  # those that no lane fitted
        self._stays: set[str] = set()  # sources whose lanes are all kept
        self._judged = 0  # findings before the present layer
        self._added: _Added | None = None

    def run(self, engine: Any, tokens: Sequence[int], positions: Sequence[int]) -> Array:
        """The engine's pass over the tokens -> the free run's logits."""
        embedded = self._begun(engine, tokens, positions)
        x = self._carried(self.to_begin or self._likely(), embedded) if engine.resumes else embedded
        for i in range(engine.n_layer):
            x = self._fitting(partial(engine.layer, i), x)
            if engine.resumes:
                x = self._narrowed(i, x)
        logits = self._fitting(engine.end, x)
        return self.free_logits if self.free_logits is not None else np.asarray(logits[0])

    def needed(self, engine: Any, tokens: Sequence[int], positions: Sequence[int]) -> Sequence[Lane]:
        """The lanes that the first layer shows to be needed."""
        self._narrowed(0, self._fitting(partial(engine.layer, 0), self._begun(engine, tokens, positions)))
        return self.lanes

    def _begun(self, engine: Any, tokens: Sequence[int], positions: Sequence[int]) -> Array:
        """What the first layer reads."""
        self._new_step: Callable[[], Any] = partial(engine.step, tokens, positions, tap=self)
        self._step = self._new_step()
        return np.asarray(engine.begin(tokens, self._step))

    def _fitting(self, part: Callable[[Array, Any], Array], x: Array) -> Array:
        """What a layer, or the end, makes of x. Where lanes that were left out might fit, it is run again with all."""
        self._judged, described = len(self.findings), Counter(self.judge.described)
        while True:
            y = part(x, self._step)
            if not self._misfits():
                return y
            del self.findings[self._judged :]
            self.judge.described = Counter(described)
            x = self._carried(self.every, x)

    def _narrowed(self, layer: int, x: Array) -> Array:
        """What the next layer begins with: the lanes that it needs, by what this one showed."""
        settled = [lane for source in self.sources.values() for lane in self._settled(source, layer)]
        needed = [lane for lane in self.lanes if lane.source is None or lane in settled]
        names = [tap.name for tap in self.present.values() if tap.layer == layer]
        for source in self.sources.values():
            source.trace.forget(names)
        return self._carried(needed, x) if len(needed) < len(self.lanes) else x

    def _carried(self, lanes: Sequence[Lane], x: Array) -> Array:
        """Go on with other lanes: what they begin with, as those of one source have the same values there."""
        places = [self.lanes.index(lane) if lane in self.lanes else self._first(lane.source) for lane in lanes]
        self._carry(lanes)
        self._step = self._new_step()
        return x[places]

    def __call__(self, name: str, x: Array) -> Array:
        tap = self.present.get(name)
        if tap is None:
            raise UserError(f"the engine has a tap {name} that the vocabulary does not list")
        if x.shape[0] != len(self.lanes):  # the embedding: one run becomes a run a lane
            x = np.broadcast_to(x, (len(self.lanes), *x.shape[1:]))
        self.keep(name, x[0])
        if name == "result_output" and not self.lanes[0].source:
            self.free_logits = x[0]
        spans = {source.name: self._opened(source, tap) for source in self.sources.values()}
        lost, self.lost = self.lost, {}
        self.judge.lost.update({(str(self.lanes[number].source), name): nmse for number, nmse in lost.items()})
        recorded = {
            source.name: self._recorded(source, tap, x.shape[1:])
            for source in self.sources.values()
            if name in source.trace
        }
        self._note_sums(name, x, recorded)
        given = self._sketched.pop(name, None)
        if given is not None:
            assert x is given.values, f"{name} is not the product that was verified"
            self.findings.append(self.judge.of_sketches(tap, [*x], self.lanes, given.rows, spans, given.sketched))
            return x
        self.findings.append(self.judge.finding(tap, [*x], self.lanes, recorded, spans))
        return self._followed(name, x, recorded)

    def _followed(self, name: str, x: Array, recorded: Mapping[str, Array]) -> Array:
        """What the engine goes on with: the sources' own values in their lanes, where they have any."""
        if not recorded and not any(lane.shaken for lane in self.lanes):
            return x
        if recorded and len(self.lanes) == 1 and self.sources[str(self.lanes[0].source)].is_whole(name):
            return recorded[str(self.lanes[0].source)][None].astype(x.dtype, copy=False)
        out = np.empty_like(x)
        for number, lane in enumerate(self.lanes):
            values = x[number]
            if lane.source is not None and lane.source in recorded:
                own, rows = recorded[lane.source], self.sources[lane.source].whole_rows(name)
                values = own if rows is None else np.where(_along_first(rows, own), own, values)
            if lane.policy in JITTERS and lane.source is not None:
                values = shaken(values, self.sources[lane.source].shown_in(name), JITTERS.index(lane.policy))
            out[number] = values
        return out

    # -- dropping lanes that cannot win ---------------------------------------------------------------------------

    def _carry(self, lanes: Sequence[Lane]) -> None:
        """Go on with these lanes."""
        self.lanes = tuple(lanes)
        self._read = ()
        self._combined_last: tuple[Array, tuple[Array, Array | None]] | None = None
        reading = next((source.reading for source in self.sources.values() if source.reading), None)
        ways = [(lane.policy, lane.stored(self.sources)) for lane in self.lanes]
        super().__init__(ways, reading, self.judge.edges)

    def _misfits(self) -> bool:
        """Whether lanes that were left out might have fitted the present layer's taps.

        Where they do not, once, a tap of that kind is not tried again; over spans they also measure the noise.
        """
        found: set[tuple[str, str]] = set()
        for finding in self.findings[self._judged :]:
            for name, local in finding.local.items():
                kind = (name, finding.tap.kind.word)
                if local.verdict == tolerances.MATCH or kind in self._excused:
                    continue
                if self._is_short(name):
                    found.add(kind)
                    if local.span:
                        self._stays.add(name)
                elif kind in self._tried:
                    self._excused.add(kind)
        self._tried = found
        return bool(found)

    def _is_short(self, name: str) -> bool:
        """Whether lanes of a source are left out."""
        return sum(lane.source == name for lane in self.lanes) < sum(lane.source == name for lane in self.every)

    def _settled(self, source: Source, layer: int) -> list[Lane]:
        """The lanes of a source that the layers after this one need: the fewest that fitted whatever fits."""
        own = [lane for lane in self.lanes if lane.source == source.name]
        if not self._can_leave_out(source, layer) or len(own) == 1:
            return own
        shown = [
            finding.fitting[source.name] for finding in self.findings[self._judged :] if source.name in finding.fitting
        ]
        needed = {policies for phases in shown for policies in phases if policies}
        if not needed:
            return own
        policies = {*_cover([lane.policy for lane in own], needed)}
        if source.reading:  # which fits nothing to the last bit, and is the engine's all the same
            policies |= {own[0].policy, READ, READ_SHAKEN}
        return [lane for lane in own if lane.policy in policies]

    def _likely(self) -> list[Lane]:
        """Of llama.cpp's lanes its own arithmetic alone, the last: the others are tried where that does not fit."""
        own = [lane for lane in self.every if lane.source == "baseline"]
        left_out = own[:-1] if self._can_leave_out(self.sources["baseline"], 0) else []
        return [lane for lane in self.every if lane not in left_out]

    def _can_leave_out(self, source: Source, layer: int) -> bool:
        """Whether a source's lanes all go on from a layer with the same values, and none measures noise."""
        return source.is_whole(f"{taps.RESIDUAL}-{layer}") and not source.is_rough and source.name not in self._stays

    def _first(self, source: str | None) -> int:
        return next(number for number, lane in enumerate(self.lanes) if lane.source == source)

    # -- what the engine asks -------------------------------------------------------------------------------------

    def wanted(self, name: str) -> bool:
        """Whether a trace has a tap; if none does, what comes after it answers for it."""
        found = any(name in source.trace for source in self.sources.values())
        if not found:
            for source in self.sources.values():
                self._opened(source, self.present[name])
        return found

    def rounded(self, kind: str, *arrays: Array) -> tuple[Array, ...]:
        """As the lanes round them, and shaken where these are."""
        rounded = super().rounded(kind, *arrays)
        return rounded if kind in (*CACHES, GELU) else (self.product(rounded[0]), *rounded[1:])

    def multiplied(self, product: WeightProduct) -> Array:
        known = self._known(product)
        return product.compute() if known is None else known

    def _known(self, product: WeightProduct) -> Array | None:
        """What was recorded of a product, in each lane, if it can be seen without computing it that it is right."""
        tap = self.present.get(self.products.get(product.name, ""))
        if tap is None or product.scale is not None or not self._can_sketch(tap):
            return None
        shape = (*product.x.shape[1:-1], product.width)
        recorded = {name: self._recorded(self.sources[name], tap, shape) for name in self._replayed}
        sketching = Sketching.of(product, self._combined(product), self.combinations, self.lanes)
        rows, sketched = {name: metrics.Rows(values) for name, values in recorded.items()}, {}
        for name in recorded:
            seen = sketching.seen(name, rows[name], self.judge.match_of(self.sources[name], tap), self.judge.phases)
            if seen is None:
                return None
            sketched[name] = seen
        given = _by_lane([recorded[str(lane.source)] for lane in self.lanes], product.x.dtype)
        self._sketched[tap.name] = _Given(given, sketched, rows)
        return given

    def _can_sketch(self, tap: taps.Tap) -> bool:
        """Whether a tap may be verified by sketch: of many tokens, recorded whole and in float32 by every source that
        is replayed, with nothing that measures noise, or draws pictures, beside.
        """
        many = len(self.judge.positions) >= LEAST and self.judge.pictured is None
        return many and not any(lane.source is None or lane.shaken for lane in self.lanes) and all(
            source.is_whole(tap.name) and source.shown_in(tap.name) == F32 and not source.trace.printed.slack
            for source in map(self.sources.__getitem__, self._replayed)
        )  # fmt: skip

    @property
    def _replayed(self) -> list[str]:
        """The sources that have lanes."""
        return list(dict.fromkeys(str(lane.source) for lane in self.lanes))

    def _combined(self, product: WeightProduct) -> tuple[Array, Array | None]:
        """The rows of a product's operands, combined; of those that several products read in turn, once."""
        if self._combined_last is None or self._combined_last[0] is not product.x:
            sums = None if product.sums is None else self.combinations.rows(product.sums)
            self._combined_last = product.x, (self.combinations.rows(product.x), sums)
        return self._combined_last[1]

    def summed(self, y: Array, kind: str, parts: Matrices, start: int = 0, by_row: bool = False) -> Array:
        """As the lanes add it. The last product of float16's numbers is kept in mind: what was recorded may show how a
        source adds that does not say so.
        """
        self._added = None
        for number, lane in enumerate(self.lanes):
            stored = self.sources[lane.source].stored if lane.source == "candidate" else {"sums": "its own"}
            if "sums" not in stored and rounding_type(lane.policy, kind, stored) == "F16":
                self._added = _Added(number, y.shape[1:], self._kernel(kind, start, by_row), parts)
        return super().summed(y, kind, parts, start, by_row)

    def _note_sums(self, name: str, x: Array, recorded: Mapping[str, Array]) -> None:
        """How the candidate added the product that this tap is, where that is not float32's way."""
        added, self._added = self._added, None
        if added is None or not self.sources["candidate"].is_whole(name):
            return
        found, rows = recorded["candidate"], half_sums.some(x.shape[1], half_sums.ROWS)
        limit = tolerances.rule_for(self.judge.rules, name, "MUL_MAT", "F16").match
        own = (values for lane, values in zip(self.lanes, x, strict=True) if lane.source == "candidate")
        if any(metrics.nmse(found[rows], values[rows], 0) <= limit for values in own):
            return
        with suppress(ValueError, IndexError):  # the tap is not the product itself, but a part of it perhaps
            ways = added.kernel.shown(found.reshape(added.shape), added.parts(added.number))
            self.judge.ways = ((self.judge.ways & ways) or self.judge.ways) or ways

    def product(self, y: Array) -> Array:
        """Shaken in the lanes of an engine that keeps its products in 16 bits, and its weights perhaps too.

        A product before its bias is added; and its operand, which moves a product as rounded weights do.
        """
        kept = [self.sources[lane.source].products if lane.source else F32 for lane in self.lanes]
        if not any(lane.policy in JITTERS and kind != F32 for lane, kind in zip(self.lanes, kept, strict=True)):
            return y
        y = self._widened(y)
        for number, (lane, kind) in enumerate(zip(self.lanes, kept, strict=True)):
            if lane.policy in JITTERS:
                y[number] = shaken(y[number], kind, JITTERS.index(lane.policy))
        return y

    def angles(
        self, cos: Array, sin: Array, rope: Rope, positions: Array, factors: Array | None
    ) -> tuple[Array, Array]:
        self.judge.mean_square_angle[rope] = float(np.mean(ops.rope_theta(rope, positions, factors) ** 2))
        return super().angles(cos, sin, rope, positions, factors)

    def _opened(self, source: Source, tap: taps.Tap) -> tuple[str, ...]:
        """The unrecorded taps that lie between this one and the recorded ones before it."""
        inputs = self.inputs(tap)
        wanted = None if tap.kind.word in MIXING else source.rows_with_values(tap.name)
        open_ones = [i for i in inputs if not _has_rows(source, i, wanted)]
        opened = tuple(dict.fromkeys(name for i in open_ones for name in source.spans.get(i, ())))
        if not source.is_whole(tap.name):
            source.spans[tap.name] = opened if tap.kind.optional else (*opened, tap.name)
        return opened

    def _recorded(self, source: Source, tap: taps.Tap, shape: tuple[int, ...]) -> Array:
        """The trace's values in the engine's shape."""
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


def _cover(policies: Sequence[str], needed: Iterable[frozenset[str]]) -> tuple[str, ...]:
    """The fewest policies of which each needed set has one, the earlier first."""
    needed = list(needed)
    tried = (some for count in range(1, len(policies)) for some in combinations(policies, count))
    return next((some for some in tried if all(wanted & set(some) for wanted in needed)), tuple(policies))


def _by_lane(values: Sequence[Array], dtype: Any) -> Array:
    """Values of each lane, [lane, ...]: a view where they are one source's, a copy where they are several's."""
    first = values[0].astype(dtype, copy=False)
    if all(value is values[0] for value in values):
        return np.broadcast_to(first, (len(values), *first.shape))
    return np.stack(values).astype(dtype, copy=False)


def _along_first(rows: Array, values: Array) -> Array:
    """Flags of rows, to be broadcast against a tap whose first axis runs over tokens."""
    return rows.reshape(-1, *[1] * (values.ndim - 1))


def _has_rows(source: Source, name: str, wanted: Array | None) -> bool:
    """Whether a partial tap has all the rows that a partial tap after it needs."""
    rows = source.whole_rows(name)
    return rows is not None and wanted is not None and bool((rows | ~wanted).all())
