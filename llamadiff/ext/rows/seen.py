"""Which keys a token's attention saw, read back from what it gave: of all runs of keys one gives it, if any does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import gcd
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llamadiff.ext.rows.row_engine import RowEngine
from llamadiff.judge.fact import Fact
from llamadiff.trace import taps
from llamadiff.trace.taps import Tap

Array = NDArray[Any]
MOST = 8  # wrong tokens that are looked at for a pattern; it is held to all of them
HEADS = 4  # groups, of which the first head is searched by; all heads are held to what is found
FEW = 3  # runs of keys that are tried for all tokens
LEFT, NEAR = 1e-3, 1e-5  # of the error, and as NMSE, that a set of keys may leave
BLOCKS = (8, 16, 32, 64, 128, 256, 512)  # keys of a page, or of a kernel's block
SINKS = (1, 2, 4, 8, 16, 32, 64, 128)  # first keys that are seen besides a window


class SpanCase(Protocol):
    """What is known of a wrong tap (ext/explain/case.py)."""

    tap: Tap
    recorded: Array | None
    values: Callable[[str], Array]

    @property
    def engine(self) -> Any: ...


@dataclass(frozen=True)
class Seen:
    """The keys from ``first`` to ``last`` that the token at ``position`` saw, without those of ``but``."""

    position: int
    first: int
    last: int
    but: tuple[int, int] | None = None  # a run that is left out: from, to before

    def mask(self, n: int) -> Array:
        """Which of ``n`` keys."""
        keys = np.arange(n)
        there = (keys >= self.first) & (keys <= self.last)
        return there if self.but is None else there & ((keys < self.but[0]) | (keys >= self.but[1]))

    def says(self) -> str:
        but = "" if self.but is None else f" but for {_run(*self.but)}"
        return f"sees keys {self.first} to {self.last}{but}"


def _run(start: int, stop: int) -> str:
    return f"key {start}" if stop == start + 1 else f"keys {start} to {stop - 1}"


@dataclass(frozen=True)
class Query:
    """A row's query with all keys: their ``weights`` [kv_head, head in group, key], not normalised, what each head has
    ``beside`` them in the sum, ``v`` [kv_head, key, dim]; and what was ``recorded`` [kv_head, head in group, dim].

    ``first``: the first key that it should see.
    """

    row: int
    position: int
    first: int
    weights: Array
    v: Array
    beside: Array
    recorded: Array

    @property
    def right(self) -> Seen:
        return Seen(self.position, self.first, self.position)

    def left(self, seen: Seen) -> float:
        """The NMSE that a set of keys leaves."""
        w = np.where(seen.mask(self.weights.shape[-1]), self.weights, 0.0)
        with np.errstate(all="ignore"):  # of no key at all nothing is left, which fits nothing
            made = w @ self.v / (w.sum(axis=-1) + self.beside)[..., None]
            return float(np.square(made - self.recorded).sum() / np.square(self.recorded).sum())

    def fits(self, seen: Seen) -> bool:
        left = self.left(seen)
        return left <= NEAR and left <= LEFT * self.left(self.right)

    @cached_property
    def _sums(self) -> tuple[Array, Array]:
        """Of a head of each group, sums up to before each key: of weights [head, key + 1], and of what they weigh."""
        w = self.weights[:HEADS, 0]
        weighed = w[..., None] * self.v[:HEADS]
        total, mixed = (np.concatenate([np.zeros_like(x[:, :1]), x.cumsum(axis=1)], axis=1) for x in (w, weighed))
        return total, mixed

    def best(self, start: Array, stop: Array, but: tuple[Array, Array] | None = None) -> int:
        """Which of many sets comes nearest: keys ``start`` to before ``stop``, without those of ``but``."""
        total, mixed = self._sums
        w, x = total[:, stop] - total[:, start], mixed[:, stop] - mixed[:, start]
        if but is not None:
            w, x = w - (total[:, but[1]] - total[:, but[0]]), x - (mixed[:, but[1]] - mixed[:, but[0]])
        with np.errstate(all="ignore"):
            made = x / (w + self.beside[:HEADS, :1])[..., None]
            gaps = np.square(made - self.recorded[:HEADS, :1]).sum(axis=(0, 2))
        return int(np.where(np.isfinite(gaps), gaps, np.inf).argmin())

    def seen(self) -> Seen | None:
        """The run of keys that gives what was recorded; None if none does."""
        for seen in self._tried(np.arange(self.weights.shape[-1] + 1), self.position + 1):
            if self.fits(seen):
                return seen
        return None

    def _tried(self, keys: Array, end: int) -> Iterator[Seen]:
        starts, stops = keys[:end], keys[self.first + 1 :]
        start = int(starts[self.best(starts, np.full_like(starts, end))])
        yield Seen(self.position, start, self.position)
        stop = int(stops[self.best(np.full_like(stops, self.first), stops)])
        yield Seen(self.position, self.first, stop - 1)
        for size in (1, *BLOCKS):  # one that is not seen
            some = keys[self.first // size * size : end : size]
            whole = np.full_like(some, self.first), np.full_like(some, end)
            after = np.minimum(some + size, end)
            at = self.best(*whole, (np.maximum(some, self.first), after))
            yield Seen(self.position, self.first, self.position, (max(int(some[at]), self.first), int(after[at])))
        for sinks in SINKS:
            some = keys[min(sinks, end - 1) : end]
            at = self.best(np.zeros_like(some), np.full_like(some, end), (np.full_like(some, sinks), some))
            yield Seen(self.position, 0, self.position, (sinks, int(some[at])))


def seen_keys(case: SpanCase) -> tuple[Fact, ...]:
    """Which keys wrong tokens saw, where that explains all of what attention gave them; else nothing."""
    engine = case.engine
    if case.tap.kind.word != "kqv_out" or not isinstance(engine, RowEngine) or case.recorded is None:
        return ()
    queries = list(_queries(case, engine))
    wrong = [query for query in queries if query.left(query.right) > NEAR]
    some = [wrong[place] for place in np.unique(np.linspace(0, len(wrong) - 1, min(MOST, len(wrong))).astype(int))]
    found = [query.seen() for query in some]
    seen = [each for each in found if each is not None]
    if not wrong or len(seen) < len(found):
        return ()
    for says, rule in _patterns(seen, [query.right for query in some]):
        if all(query.fits(rule(query.right)) for query in wrong):
            return (Fact("keys", says, tuple((each.position, each.first, each.last) for each in seen)),)
    told = [f"token {query.row} {each.says()}, where {query.first} to {query.position} are right"
            for query, each in zip(some[:3], seen, strict=False)]  # fmt: skip
    return (Fact("keys", ", ".join(told), tuple((each.position, each.first, each.last) for each in seen)),)


Rule = Callable[[Seen], Seen]


def _patterns(seen: Sequence[Seen], right: Sequence[Seen]) -> Iterator[tuple[str, Rule]]:
    """What sets of keys have in common, in words, and as what any token sees by that; ``right``: what they should."""
    runs = sorted({each.but for each in seen if each.but is not None})
    if not runs:
        yield from _first_keys(seen, right)
        yield from _last_keys(seen, right)
    for run in runs[:FEW]:
        yield f"does not see {_run(*run)}", partial(_without, run)
    far = {each.position + 1 - each.but[1] for each in seen if each.but}
    if len({start for start, _ in runs}) == len(far) == 1:
        sinks, window = runs[0][0], far.pop()
        says = f"sees the first {sinks} keys and the last {window} alone"
        yield says, lambda r: _without((sinks, max(sinks, r.position + 1 - window)), Seen(r.position, 0, r.last))


def _without(but: tuple[int, int], right: Seen) -> Seen:
    return Seen(right.position, right.first, right.last, but)


def _first_keys(seen: Sequence[Seen], right: Sequence[Seen]) -> Iterator[tuple[str, Rule]]:
    firsts, far = {each.first for each in seen}, {each.position + 1 - each.first for each in seen}
    windows = {each.position + 1 - each.first for each in right}
    if any(each.last != each.position for each in seen):
        return
    if len(firsts) == 1:
        first = seen[0].first
        says = f"sees keys from {first} on alone" if first else "sees all keys before it"
        yield says, lambda r: Seen(r.position, first, r.last)
    if len(far) == 1:
        window = far.pop()
        own = f", where the window is {windows.pop()}" if len(windows) == 1 else ""
        says = "sees itself alone" if window == 1 else f"sees the last {window} keys alone{own}"
        yield says, lambda r: Seen(r.position, max(0, r.position + 1 - window), r.last)
    size = gcd(*firsts)
    if size > max(each.position - each.first for each in seen):
        says = f"sees keys from the last multiple of {size} on alone"
        yield says, lambda r: Seen(r.position, r.position // size * size, r.last)


def _last_keys(seen: Sequence[Seen], right: Sequence[Seen]) -> Iterator[tuple[str, Rule]]:
    if any(each.first != own.first for each, own in zip(seen, right, strict=True)):
        return
    beyond, lasts = {each.last - each.position for each in seen}, {each.last for each in seen}
    if len(beyond) == 1:
        by = beyond.pop()
        many = f"the last {-by} keys, its own among them" if by < -1 else "its own key"
        says = f"does not see {many}" if by < 0 else f"sees {by} key{'s' if by > 1 else ''} after its own"
        yield says, lambda r: Seen(r.position, r.first, r.position + by)
    if len(lasts) == 1:
        last = seen[0].last
        yield f"sees no key after {last}", lambda r: Seen(r.position, r.first, min(r.position, last))
    fits = (size for size in BLOCKS[::-1] if all(each.last + 1 == (each.position + 1) // size * size for each in seen))
    for size in fits:
        yield f"does not see the last block of {size} keys, which is not full", partial(_of_whole_blocks, size)


def _of_whole_blocks(size: int, right: Seen) -> Seen:
    return Seen(right.position, right.first, (right.position + 1) // size * size - 1)


def _queries(case: SpanCase, engine: RowEngine) -> Iterator[Query]:
    """The tokens that are judged, each with all keys that the candidate kept."""
    layer, recorded = case.tap.layer, case.recorded
    assert layer is not None
    assert recorded is not None
    side = "candidate" if "candidate" in engine.kept else "baseline"
    k, v = (np.asarray(engine.kept[side][f"{name}-{layer}"], np.float64) for name in ("kv_k", "kv_v"))
    scores = taps.parse(f"kq-{layer}")
    assert scores is not None
    q = np.asarray(case.values(engine.model.inputs(scores)[0])[0], np.float64)
    heads, groups = engine.config.n_head, engine.config.n_head_kv
    k, v = (x.reshape(len(x), groups, -1).swapaxes(0, 1) for x in (k, v))  # [kv_head, key, dim]
    q, own = (np.asarray(x, np.float64).reshape(len(engine.here), groups, heads // groups, -1) for x in (q, recorded))
    scoring, c = engine.scoring[layer], engine.config
    before, after = (c.attention_scale, 1.0) if c.traits.scales_queries else (1.0, c.attention_scale)
    cap, window, sinks = scoring.get("cap") or 0.0, scoring.get("window") or 0, scoring.get("sinks")
    for row, position in enumerate(engine.here):
        raw = before * q[row] @ k.swapaxes(1, 2)
        raw = after * (cap * np.tanh(raw / cap) if cap else raw)
        top = raw.max(axis=-1, keepdims=True)
        beside = np.zeros(raw.shape[:2]) if sinks is None else np.exp(np.reshape(sinks, raw.shape[:2]) - top[..., 0])
        first = max(0, position + 1 - window) if window else 0
        yield Query(row, position, first, np.exp(raw - top), v, beside, own[row])
