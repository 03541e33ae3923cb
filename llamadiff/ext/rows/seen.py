"""Which keys the queries of a long prompt saw, read back from Q, K, V and attention's output, as they were recorded.

An output is the mean of the rows of V that its query sees, by their weights. So the sum over keys of
weight x (V's row - output) is zero over what was seen, whatever that is: sets of keys are found as sums that are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.ext.rows.row_engine import RowModel
from llamadiff.trace.reader import Trace

Array = NDArray[Any]
OUTPUT = "kqv_out"
VALUES = 256  # of an output, that are looked at: of heads beside each other the first ones
LAID_OPEN, LAID_OPEN_AT = 1e-5, 4  # NMSE of the baseline's outputs, up to which they are computed here; so many
APART = 1e-8  # of an output's square, from where on it is off
LEFT = 1e-4  # of the square of what it is off, that what was seen may leave
NO_WEIGHT = 1e-9  # of all weights: of keys that weigh less nothing is known
WHOLE = 0.05  # how near 1 it must be how often a key is lacking
MOST = 48  # single keys that are looked for
SPREAD, ROWS, TRIED = 200, 24, 6  # outputs that are computed; of those off, that are looked at; in vain
NEAR, NEAREST = 2, 16  # sums next to the one wanted, on each side; and those of them that are looked at
PAGES = (256, 128, 64, 32, 16, 8)


@dataclass(frozen=True)
class Seen:
    """What a query at a ``position`` saw: all but the keys it ``lacks``, and some it should not: ``adds``.

    ``zeros``: rows of zeros besides. ``page``: where a page of keys is, where it was read from, and its size.
    """

    position: int
    right: range
    lacks: tuple[int, ...] = ()
    adds: tuple[int, ...] = ()
    zeros: int = 0
    page: tuple[int, int, int] | None = None

    @cached_property
    def keys(self) -> tuple[int, ...]:
        """What it saw, of what is stored."""
        return tuple(sorted(({*self.right} - {*self.lacks}) | {*self.adds}))


@dataclass(frozen=True)
class Attention:
    """A layer's attention: q and out [row, head, dim], k and v [key, kv_head, dim], positions [row]."""

    q: Array
    k: Array
    v: Array
    out: Array
    positions: Array
    scale: float
    window: int
    cap: float

    @cached_property
    def heads(self) -> NDArray[np.int64]:
        """The heads that are looked at."""
        return np.arange(self.q.shape[1])[: max(1, VALUES // self.v.shape[-1])]

    @cached_property
    def keys_and_values(self) -> tuple[Array, Array]:
        """Of these heads: each [head, key, dim]."""
        kv = self.heads // (self.q.shape[1] // self.k.shape[1])
        k, v = (np.ascontiguousarray(x[:, kv].swapaxes(0, 1), np.float64) for x in (self.k, self.v))
        return k, v

    def query(self, row: int) -> Query:
        """One of the rows."""
        k, v = self.keys_and_values
        position = int(self.positions[row])
        right = range(max(0, position + 1 - self.window) if self.window else 0, position + 1)
        scores = (k @ self.q[row, self.heads].astype(np.float64)[..., None])[..., 0] * self.scale
        scores = self.cap * np.tanh(scores / self.cap) if self.cap else scores
        top = scores.max(axis=1, keepdims=True)
        weights, one = np.exp(scores - top), np.exp(-top)
        total = weights[:, right.start : right.stop].sum(axis=1, keepdims=True)
        out = self.out[row, self.heads].astype(np.float64)
        return Query(position, right, weights / total, one / total, v, out)


@dataclass(frozen=True)
class Query:
    """One query: ``weights`` [head, key] that sum to one over the ``right`` keys, ``v`` [head, key, dim], ``out``.

    ``one``: what a score of zero weighs [head, 1].
    """

    position: int
    right: range
    weights: Array
    one: Array
    v: Array
    out: Array

    @cached_property
    def pulls(self) -> Array:
        """What each key adds to the sum that is zero over what was seen: [key, head * dim]."""
        pulls = self.weights[..., None] * (self.v - self.out[:, None])
        return np.asarray(pulls.swapaxes(0, 1).reshape(len(self.v[0]), -1))

    @cached_property
    def sums(self) -> Array:
        """Running sums of the pulls: [key + 1, head * dim]."""
        return np.concatenate([np.zeros((1, self.pulls.shape[1])), np.cumsum(self.pulls, axis=0)])

    @cached_property
    def gap(self) -> Array:
        """What the right output has more than the one recorded: [head * dim]."""
        right = slice(self.right.start, self.right.stop)
        mean = self.weights[:, None, right] @ self.v[:, right]
        return np.asarray(mean[:, 0] - self.out).reshape(-1)

    @property
    def is_off(self) -> bool:
        """Whether it is not the mean of what it should see."""
        return bool(np.square(self.gap).sum() > APART * np.square(self.out).sum())

    @cached_property
    def weight_sums(self) -> Array:
        """Running sums of the weights: [key + 1, head]."""
        return np.concatenate([np.zeros((1, len(self.weights))), np.cumsum(self.weights.T, axis=0)])

    def mean(self, pulls: Array, weights: Array) -> Array:
        """How far the mean over keys is from the output, of their sums [..., head * dim] and [..., head]."""
        of_heads = pulls.reshape(*weights.shape, -1) / np.where(weights > NO_WEIGHT, weights, np.nan)[..., None]
        return np.nan_to_num(of_heads, nan=np.inf).reshape(pulls.shape)

    def left(self, pulls: Array) -> Array:
        """What of the gap's square sums over what was seen leave."""
        return np.asarray(np.square(pulls).sum(axis=-1) / np.square(self.gap).sum())

    def as_seen(self, lacks: Array | tuple[int, ...] = (), adds: Array | tuple[int, ...] = (), **more: Any) -> Seen:
        """What was found."""
        return Seen(self.position, self.right, tuple(map(int, lacks)), tuple(map(int, adds)), **more)

    def of_run(self, start: int, stop: int) -> Seen:
        """That a run of keys was seen and no others."""
        keys, right = np.arange(start, stop), np.arange(self.right.start, self.right.stop)
        return self.as_seen(np.setdiff1d(right, keys), np.setdiff1d(keys, right))


def seen_by(query: Query) -> Seen | None:
    """What a query saw, if anything that is looked for fits."""
    ways = (_from_one_key_on, _up_to_a_key, _zeros, _lacking_run, _run, _single_keys, _pages)
    return next((seen for way in ways for seen in way(query)), None)


def _from_one_key_on(q: Query) -> Iterator[Seen]:
    """All keys from one on, its own last."""
    stop = q.right.stop
    means = q.mean(q.sums[stop] - q.sums[:stop], q.weight_sums[stop] - q.weight_sums[:stop])
    yield from _best(q, means[::-1], lambda n: q.of_run(stop - 1 - n, stop))


def _up_to_a_key(q: Query) -> Iterator[Seen]:
    """All keys from the first that is right on, up to one before its own, or behind it."""
    start = q.right.start
    means = q.mean(q.sums[start + 1 :] - q.sums[start], q.weight_sums[start + 1 :] - q.weight_sums[start])
    yield from _best(q, means, lambda n: q.of_run(start, start + 1 + n))


def _best(q: Query, means: Array, seen_at: Callable[[int], Seen]) -> Iterator[Seen]:
    """The set of keys that comes nearest, if it comes near; of several the first, which are the fewest."""
    left = q.left(means)
    best = int(left.argmin())
    if left[best] <= LEFT:
        yield seen_at(best)


def _zeros(q: Query) -> Iterator[Seen]:
    """Rows of zeros besides, whose scores are zero."""
    each = (q.one * q.out).reshape(-1)
    count = round(float(q.gap @ each / max(float(each @ each), 1e-300)))
    if count > 0 and q.left(q.gap - count * each) <= LEFT:
        yield q.as_seen(zeros=count)


def _lacking_run(q: Query) -> Iterator[Seen]:
    """All but a run of keys; where a window is right, also all in front of the window but a run."""
    for start in dict.fromkeys((q.right.start, 0)):
        sums, weights = (x[start : q.right.stop + 1] for x in (q.sums, q.weight_sums))
        for a, b in _pairs(sums + (sums[-1] - sums[0]), sums):
            rest = sums[-1] - sums[0] - sums[b] + sums[a]
            if a < b and q.left(q.mean(rest, weights[-1] - weights[0] - weights[b] + weights[a])) <= LEFT:
                before = np.arange(start, q.right.start)
                run = np.arange(start + a, start + b)
                yield q.as_seen(run[run >= q.right.start], np.setdiff1d(before, run))
                return


def _run(q: Query) -> Iterator[Seen]:
    """A run of keys alone."""
    for a, b in _pairs(q.sums, q.sums):
        if a < b and q.left(q.mean(q.sums[b] - q.sums[a], q.weight_sums[b] - q.weight_sums[a])) <= LEFT:
            yield q.of_run(a, b)
            return


def _pairs(wanted: Array, found: Array) -> list[tuple[int, int]]:
    """Pairs of a row of ``wanted`` and another one of ``found`` that may be alike, the nearest first."""
    views = np.random.default_rng(1).standard_normal((wanted.shape[1], 3))
    ours, theirs = wanted @ views, found @ views
    order = np.argsort(theirs[:, 0])
    places, own = np.searchsorted(theirs[order, 0], ours[:, 0]), np.arange(len(wanted))
    out = list[tuple[float, int, int]]()
    for by in range(-NEAR, NEAR + 1):
        near = order[np.clip(places + by, 0, len(order) - 1)]
        gaps = np.where(near != own, np.abs(theirs[near] - ours).max(axis=1), np.inf)
        out += [(float(gaps[a]), int(a), int(near[a])) for a in np.argsort(gaps)[:NEAREST]]
    return [(a, b) for gap, a, b in sorted(out) if np.isfinite(gap)]


def _single_keys(q: Query) -> Iterator[Seen]:
    """Keys here and there: those that are lacking, and those that should not be seen; each once."""
    sign = np.where(np.isin(np.arange(len(q.pulls)), np.arange(q.right.start, q.right.stop)), 1.0, -1.0)
    columns, chosen, rest = q.pulls * sign[:, None], list[int](), q.gap
    sizes = np.sqrt(np.square(columns).sum(axis=1))
    for _ in range(min(MOST, len(q.gap) // 4)):
        chosen.append(int(np.argmax((columns @ rest) / np.maximum(sizes, 1e-300))))
        if len({*chosen}) < len(chosen):
            return
        some = columns[chosen]
        times = np.linalg.solve(some @ some.T, some @ q.gap)
        rest = q.gap - times @ some
        seen = 1 - (q.weights[:, chosen] * sign[chosen]).sum(axis=1)
        if q.left(q.mean(rest, seen)) <= LEFT:
            if np.abs(times - 1).max() <= WHOLE:
                keys = np.array(sorted(chosen))
                yield q.as_seen(keys[sign[keys] > 0], keys[sign[keys] < 0])
            return


def _pages(q: Query) -> Iterator[Seen]:
    """A page of keys read from another one's place; of the last page, what there is of it."""
    for size in PAGES:
        last = (q.right.stop - 1) // size * size
        for length in dict.fromkeys((q.right.stop - last, size)):
            starts = np.arange(0, len(q.pulls) - length + 1, size)
            pages = q.sums[starts + length] - q.sums[starts]
            for a, b in _pairs(pages - q.gap, pages):
                there = starts[a] == last or length == size
                if there and starts[a] + length <= q.right.stop and q.left(q.gap - pages[a] + pages[b]) <= LEFT:
                    yield q.as_seen(page=(int(starts[a]), int(starts[b]), length))
                    return


@np.errstate(all="ignore")  # what is not finite is not laid open
def attention_of(
    engine: RowModel, layer: int, traces: Mapping[str, Trace], kept: Mapping[str, Trace]
) -> Attention | None:
    """A candidate's attention, of traces and of what they kept of K and V.

    None where a part was not recorded, or where the baseline's is not computed as it is here.
    """
    kq = next((tap for tap in engine.taps if tap.name == f"kq-{layer}"), None)
    query, output, config = engine.inputs(kq)[0] if kq is not None else "", f"{OUTPUT}-{layer}", engine.engine.config
    if any(each not in trace for trace in traces.values() for each in (query, output)):
        return None
    sides = dict[str, Attention]()
    for name, trace in traces.items():
        k, v = (np.asarray(kept[name][f"kv_{s}-{layer}"], np.float32) for s in "kv")
        k, v = (x.reshape(len(x), config.n_head_kv, -1) for x in (k, v))
        q, out = (np.asarray(trace[each]).reshape(len(trace[each]), config.n_head, -1) for each in (query, output))
        where, window = np.array(trace.info.positions), engine.engine.windows[layer]
        sides[name] = Attention(q, k, v, out, where, config.attention_scale, window, config.attention_cap)
    own = sides["baseline"]
    queries = [own.query(int(row)) for row in np.linspace(0, len(own.q) - 1, LAID_OPEN_AT)]
    off = max(float(np.square(each.gap).sum() / np.square(each.out).sum()) for each in queries)
    return sides.get("candidate") if off <= LAID_OPEN else None


@np.errstate(all="ignore")
def seen_in(attention: Attention) -> tuple[list[Seen], int]:
    """What queries saw whose output is off: of some of these what could be told, and how many were looked at."""
    spread = np.unique(np.linspace(0, len(attention.q) - 1, SPREAD).astype(int))
    rows = [row for row in spread if attention.query(row).is_off]
    some = [rows[n] for n in np.unique(np.linspace(0, len(rows) - 1, ROWS).astype(int))] if rows else []
    found = {row: seen_by(attention.query(row)) for row in some[:: max(1, len(some) // TRIED)]}
    if any(found.values()):
        found |= {row: seen_by(attention.query(row)) for row in some if row not in found}
    return [seen for row in some if (seen := found.get(row)) is not None], len(some)
