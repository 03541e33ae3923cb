"""Bugs replayed through what was not recorded: the engine runs from the last recorded taps to the next one.

Every known bug is a lane of one batch, so one pass over the weights tries them all. Where nothing but the logits was
recorded, the span is the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from llamaref import Engine
from llamaref.engine import Step
from numpy.typing import NDArray

from llamadiff.diagnose.case import Case, NotRecordedError, Recording
from llamadiff.diagnose.registry import Bug, known_bugs, reads_blocks, recipe_of
from llamadiff.diagnose.search import EXPLAINS, TIE, Clock, Fit, Outcome, ReplayedBug, changes_of, likeliest_first
from llamadiff.judge.finding import Local
from llamadiff.judge.lanes import Source
from llamadiff.numerics.policies import F32
from llamadiff.numerics.rounding_tap import Carrier
from llamadiff.system.progress import Progress
from llamadiff.trace import taps
from llamadiff.trace.reader import Trace

Array = NDArray[Any]
COLUMNS = 512  # tokens of all lanes of a pass: more cost time, fewer cost passes over the weights
FEW = 5  # tokens that a long span is first tried on
MEMORY = 1 << 28  # bytes that one tap of all lanes may take
FINALISTS = 6  # bugs that are tried in every arithmetic
ZOOMS, POINTS = 8, 12  # rounds and values a round, to solve for a constant
EXACT = 1e-11  # NMSE of a fit that leaves nothing to look for


class _Reached(Exception):  # noqa: N818  (not an error)
    """The tap that is judged has been computed."""


@dataclass(frozen=True)
class BugLane:
    """A bug, one of its variants, the ops (by their taps' words) that have it, and an arithmetic."""

    bug: Bug | None
    variant: str
    value: float | None
    words: tuple[str, ...]
    policy: str
    at: str = ""
    whole: bool = True  # whether these are all of the span's ops that can have it


@dataclass(frozen=True)
class Span:
    """The taps that one recorded tap answers for, and where they start."""

    run: Recording
    source: Source
    judged: taps.Tap
    needed: frozenset[str]
    limit: float

    @property
    def layers(self) -> range:
        numbers = [tap.layer for name in self.needed if (tap := taps.parse(name)) and tap.layer is not None]
        return range(min(numbers), max(numbers) + 1) if numbers else range(0)

    @property
    def entry(self) -> str | None:
        """The recorded tap that the first layer reads; None if the embedding is part of the span."""
        n_layer = self.run.model.n_layer
        first = self.layers.start if self.layers else n_layer
        name = taps.input_of(first, self.run.shapes)
        return name if self.source.is_whole(name) else None


class SpanTap(Carrier):
    """A llamaref.Tap: recorded values where there are any, and in every lane its bug."""

    def __init__(self, span: Span, lanes: Sequence[BugLane], probe: Callable[[Case], None] | None = None) -> None:
        super().__init__([(lane.policy, span.source.stored) for lane in lanes])
        self.span, self.lanes, self.probe = span, lanes, probe
        self.seen: dict[str, Array] = {}
        self.said: dict[int, str] = {}
        self.result: Array | None = None

    def __call__(self, name: str, x: Array) -> Array:
        span = self.span
        if name == taps.input_of(0, span.run.shapes) and span.entry is not None:
            x = self._recorded(span.entry)
        elif span.source.is_whole(name) and name != span.judged.name:
            x = self._recorded(name)
        else:
            x = self._widened(x)
            if name in span.needed:
                self._inject(name, x)
        self._keep(name, x)
        if name == span.judged.name:
            self.result = x
            raise _Reached
        return x

    def _recorded(self, name: str) -> Array:
        run = self.span.run
        values = np.asarray(self.span.source.trace[name]).reshape(run.shapes[name])
        kind = np.int32 if name.startswith("ffn_moe_topk") else run.model.engine.w.dtype
        return np.broadcast_to(values.astype(kind), (len(self.lanes), *values.shape))

    def _inject(self, name: str, x: Array) -> None:
        tap = next(tap for tap in self.span.run.model.taps if tap.name == name)
        if self.probe is not None:
            self.probe(self._case(tap, 0))
        for number, lane in enumerate(self.lanes):
            if tap.kind.word in lane.words:
                changed = _changed(lane, self._case(tap, number, lane.value))
                if changed is not None:
                    self.said.setdefault(number, changed[0])
                    x[number] = changed[1].reshape(x.shape[1:])

    def _case(self, tap: taps.Tap, number: int, hint: float | None = None) -> Case:
        """A tap as one lane sees it."""

        def values(name: str) -> Array:
            if name not in self.seen:
                raise NotRecordedError(name)
            return self.seen[name][number : number + 1]

        run = replace(self.span.run, carrier=Carrier([self.ways[number]]))
        return Case(run, tap, values, None, hint=hint)

    def _keep(self, name: str, x: Array) -> None:
        """What later ops and bugs may read: this layer's taps, and every layer's input."""
        tap = taps.parse(name)
        if tap is not None and tap.kind.word == "attn_norm":
            stays = ("embd", "inpL", "l_out-")
            self.seen = {key: value for key, value in self.seen.items() if key.startswith(stays)}
        self.seen[name] = x
        if name == taps.input_of(0, self.span.run.shapes) and self.span.entry is not None:
            self.seen[self.span.entry] = x


class Lazy(Engine):
    """An engine that skips the products whose results were recorded."""

    def __init__(self, span: Span) -> None:
        model = span.run.model
        super().__init__(model.engine.w, n_ctx=model.engine.n_ctx)
        makes: dict[str, set[str]] = {}
        for tap, weight in model.weight_names.items():
            makes.setdefault(weight, set()).add(tap)
        self.skipped = {weight for weight, made in makes.items() if not made & span.needed}
        self.span = span

    def linear(self, x: Array, name: str, tap: Any) -> Array:
        if f"{name}.weight" in self.skipped:
            return np.zeros((*x.shape[:-1], self.w.shape(f"{name}.weight")[0]), x.dtype)
        return super().linear(x, name, tap)

    def experts(self, x: Array, name: str, chosen: Array, tap: Any) -> Array:
        if f"{name}.weight" in self.skipped:
            return np.zeros((*chosen.shape, self.w.shape(f"{name}.weight")[1]), x.dtype)
        return super().experts(x, name, chosen, tap)

    def attention(self, i: int, q: Array, k: Array, v: Array, step: Step, **how: Any) -> Array:
        own = {f"{word}-{i}" for word in ("kv_k", "kv_v", "kq", "kq_soft_max", "kqv_out")}
        if not own & self.span.needed:
            return step.tap(f"kqv_out-{i}", np.zeros((*q.shape[:2], q.shape[2] * v.shape[3]), q.dtype))
        return super().attention(i, q, k, v, step, **how)


def _changed(lane: BugLane, case: Case) -> tuple[str, Array] | None:
    """What a lane's bug does to an op, and what comes of it; None where it has nothing to change, or to go by."""
    assert lane.bug is not None
    try:
        changes = changes_of(lane.bug, recipe_of(case), case)
        change = next((change for change in changes if change.variant == lane.variant), None)
        return (change.says, change.recipe.compute(case)[0]) if change is not None else None
    except NotRecordedError:
        return None


class Trials:
    """The lanes that were tried on one span: the NMSE that each leaves, and what its op does."""

    def __init__(self, run: Recording, source: Source, tap: taps.Tap, local: Local) -> None:
        limit = min(max(local.limit, local.noise_limit), EXPLAINS * local.nmse)
        self.span = Span(run, source, tap, frozenset({*local.span, tap.name}), limit)
        self.engine = Lazy(self.span)
        self.errors: dict[BugLane, float] = {}
        self.said: dict[BugLane, str] = {}

    def variants(self) -> list[BugLane]:
        """Every variant of every bug that some op of the span can have, from one run of the right ops.

        The likeliest first, and those in all their ops before those in one.
        """
        lanes: list[BugLane] = []
        asked: set[tuple[str, tuple[str, ...]]] = set()
        inside = {tap.kind.word for name in self.span.needed if (tap := taps.parse(name)) is not None}

        def probe(case: Case) -> None:
            for known in known_bugs().values():
                own = tuple(word for word in known.words if word in inside)
                for words in _scopes(own):
                    if not known.harmless and case.tap.kind.word == words[0] and (known.name, words) not in asked:
                        asked.add((known.name, words))
                        lanes.extend(_variants(known, words, case, words == own))

        self._run(SpanTap(self.span, [BugLane(None, "", None, (), F32)], probe))
        order = {name: number for number, name in enumerate(known_bugs())}
        return sorted(lanes, key=lambda lane: (not lane.whole, order[lane.bug.name] if lane.bug else 0))

    @property
    def width(self) -> int:
        """How many lanes a pass can have."""
        largest = 4 * max(int(np.prod(shape)) for shape in self.span.run.shapes.values())
        return max(1, min(COLUMNS // len(self.span.run.tokens), MEMORY // largest))

    def run(self, lanes: Sequence[BugLane]) -> None:
        """Try lanes, as many in one pass as memory allows."""
        for start in range(0, len(lanes), self.width):
            self._pass(lanes[start : start + self.width])

    def _pass(self, lanes: Sequence[BugLane]) -> None:
        replay, span = SpanTap(self.span, lanes), self.span
        result = self._run(replay)
        recorded = np.asarray(span.source.trace[span.judged.name]).reshape(span.run.shapes[span.judged.name])
        case = Case(span.run, span.judged, _nothing, recorded)
        with np.errstate(all="ignore"):
            for number, lane in enumerate(lanes):
                self.errors[lane] = case.nmse(result[number : number + 1])
                self.said[lane] = replay.said.get(number, "")

    def _run(self, replay: SpanTap) -> Array:
        tokens, positions = self.span.run.tokens, [int(p) for p in self.span.run.positions]
        with suppress(_Reached):
            step = self.engine.step(tokens, positions, tap=replay)
            x = self.engine.begin(tokens, step)
            for layer in self.span.layers:
                x = self.engine.layer(layer, x, step)
            self.engine.end(x, step)
        assert replay.result is not None
        return replay.result

    def zoom(self, clock: Clock) -> None:
        """Constants between the familiar ones: each round, a finer grid around each bug's best.

        Where something fits already, only for the bug that fits best: a familiar value may be near the one it had.
        """
        best = min(self.errors, key=self.errors.__getitem__, default=None)
        fits = best is not None and self.errors[best] <= self.span.limit
        by_bug: dict[tuple[str, tuple[str, ...]], list[BugLane]] = {}
        for lane in self.errors:
            asked = not fits or (best is not None and (lane.bug, lane.words) == (best.bug, best.words))
            if asked and lane.bug is not None and lane.value is not None and lane.value > 0:
                by_bug.setdefault((lane.bug.name, lane.words), []).append(lane)
        for _ in range(ZOOMS):
            if clock.spent or self.best <= EXACT:
                return
            finer = [lane for lanes in by_bug.values() for lane in self._between(lanes)]
            self.run(finer)
            for lane in finer:
                assert lane.bug is not None
                by_bug[lane.bug.name, lane.words].append(lane)

    def _between(self, lanes: Sequence[BugLane]) -> list[BugLane]:
        """Values between the neighbours of the best one."""
        ordered = sorted(lanes, key=lambda lane: lane.value or 0.0)
        place = min(range(len(ordered)), key=lambda i: self.errors[ordered[i]])
        low, high = ordered[max(place - 1, 0)].value, ordered[min(place + 1, len(ordered) - 1)].value
        if low is None or high is None or high / low < 1 + 1e-9:
            return []
        return [replace(ordered[place], value=float(value)) for value in np.geomspace(low, high, POINTS + 2)[1:-1]]

    @property
    def best(self) -> float:
        return min(self.errors.values(), default=float("inf"))

    def finalists(self, lanes: Sequence[BugLane]) -> list[Fit]:
        """Lanes in every arithmetic that the trace may have: fits, best first."""
        policies = [lane.policy for lane in self.span.source.lanes if not lane.shaken]
        self.run([replace(lane, policy=policy) for lane in lanes for policy in policies])
        fits = []
        for lane in lanes:
            ways = [replace(lane, policy=policy) for policy in policies]
            fits.append(self.fit(min(ways, key=self.errors.__getitem__)))
        return sorted((fit for fit in fits if fit.nmse <= self.span.limit), key=lambda fit: fit.nmse)

    def fit(self, lane: BugLane) -> Fit:
        """A lane as a fit."""
        assert lane.bug is not None
        step = ReplayedBug(lane.bug, lane.variant, self.said.get(lane, ""), lane.value, lane.at, lane.words)
        return Fit((step,), self.errors[lane])


def search_span(
    run: Recording, source: Source, tap: taps.Tap, local: Local, clock: Clock, progress: Progress
) -> Outcome:
    """Replay every known bug through a span; the nearest, if none fits.

    A span of several layers is tried on the first few tokens, and what comes near on all of them.
    """
    whole = Trials(run, source, tap, local)
    short = len(whole.span.layers) > 1 and len(run.tokens) > 2 * FEW and run.n_prefill == len(run.tokens)
    first = Trials(*_first_tokens(run, source, FEW), tap, local) if short and source.is_whole(tap.name) else whole
    for trials in dict.fromkeys((first, whole)):
        complete = _tried(trials, clock, progress)
        ordered = sorted(trials.errors, key=trials.errors.__getitem__)
        fits = whole.finalists(ordered[:FINALISTS])
        if fits:
            equals = {(fit.causes, fit.says): fit for fit in reversed(fits) if fit.nmse <= TIE * fits[0].nmse + 1e-12}
            return Outcome(likeliest_first(equals.values()), (), complete)
    return Outcome((), tuple(_first_of_each(map(trials.fit, ordered), 3)), complete)


def _tried(trials: Trials, clock: Clock, progress: Progress) -> bool:
    """Run every lane, and solve for constants; whether there was time for all that is needed.

    Once one fits exactly, only what might be the same bug in other words is tried.
    """
    lanes = trials.variants()
    count, exact = len(lanes), False
    while lanes and not clock.spent:
        progress(f"replaying known bugs up to {trials.span.judged.name}", count - len(lanes), count)
        trials.run(lanes[: trials.width])
        lanes = lanes[trials.width :]
        if not exact and trials.best <= EXACT:
            exact, lanes = True, [lane for lane in lanes if lane.whole and lane.bug and not reads_blocks(lane.bug)]
    trials.zoom(clock)
    return not lanes


def _first_tokens(run: Recording, source: Source, count: int) -> tuple[Recording, Source]:
    """The beginning of a run: later tokens change nothing in it."""

    def cut(name: str, x: Any) -> Any:
        tap = taps.parse(name)
        if tap is None:
            return x
        x = x[(slice(None),) * tap.row_axis + (slice(count),)]
        return x[..., :count] if tap.causal else x

    trace = source.trace
    info = replace(trace.info.head(count), n_prefill=count, batches=())
    arrays = {name: cut(name, trace[name]) for name in trace}
    known = {name: cut(name, mask) for name, mask in trace.known.items()}
    shapes = {name: cut(name, np.empty(shape, np.void)).shape for name, shape in run.shapes.items()}
    beginning = Trace(info, arrays, dict.fromkeys(arrays, "F32"), None, known)
    short = replace(
        run, tokens=info.tokens, positions=run.positions[:count], edges=info.edges, n_prefill=count, shapes=shapes,
        known=known,
    )  # fmt: skip
    return short, replace(source, trace=beginning)


def replayed_span(run: Recording, source: Source, tap: taps.Tap, local: Local, fits: Sequence[Fit]) -> list[Fit]:
    """Those fits of another span that fit this one too."""
    trials = Trials(run, source, tap, local)
    steps = [fit.steps[0] for fit in fits]
    return trials.finalists([BugLane(s.bug, s.variant, s.value, s.words, F32, s.at or "") for s in steps])


def _nothing(name: str) -> Array:
    raise NotRecordedError(name)


def _scopes(words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Which ops of a span may have a bug together: all of them, those of one side of attention, each alone."""
    groups = [
        tuple(words),
        tuple(word for word in words if word[:1] in "QK"),
        tuple(w for w in words if w[:1] in "QKV"),
    ]
    yield from dict.fromkeys(group for group in [*groups, *((word,) for word in words)] if group)


def _variants(known: Bug, words: tuple[str, ...], case: Case, whole: bool) -> Iterator[BugLane]:
    try:
        for change in changes_of(known, recipe_of(case), case):
            yield BugLane(known, change.variant, change.value, words, F32, case.tap.name, whole)
    except NotRecordedError:
        return


def _first_of_each(fits: Iterable[Fit], most: int) -> Iterator[Fit]:
    """The first fits of different bugs."""
    seen: set[tuple[str, ...]] = set()
    for fit in fits:
        if fit.causes not in seen and len(seen) < most:
            seen.add(fit.causes)
            yield fit
