"""Errors of sums over a cache: whether rounding made them, of its rows or of what these are multiplied by.

K and V are not recorded as they are read. But scores are linear in K, and the weighted sums in V, so that an error is
what rows that were moved would make. Rounding moves them by a part of a step and goes with nothing else: no factor of a
head, a row or a channel, no row beside; and it is spread over rows, heads and channels as one is that was drawn at
random. Whatever is not is no rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.ext.explain.alter import moved_on
from llamadiff.ext.explain.conventions.evenness import (
    CRUDE,
    EVEN,
    SUMMED,
    UNEVEN,
    USUAL_OF_8,
    Looks,
    even,
    is_steady,
)
from llamadiff.numerics.rounding import BLOCKS, LEVELS, OWN, ROW, TENSOR, UNIFORM, noise, steps

Array = NDArray[Any]
Axes = tuple[int, ...]

USUAL = 1.5 * UNIFORM * LEVELS / 7  # the rms of 4 bits, in steps of 8, with some room
DRAWS = 3  # of each kind
FURTHER = 1.6  # times as uneven as what was drawn, at most
LEFT = 0.35  # times as much as of a drawn error, that a mistake leaves of its own unexplained
TELLS = 0.9  # of a drawn error that is explained: where it is more, there are too few values to tell
CUT = 0.7  # of an error, that half a step towards zero explains where values are cut off: 3/4
PARTS: tuple[Axes, ...] = ((0, 2), (0,), (2,))  # axes over which an error is summed to parts that may stand out
SIZES = 32  # groups of values by size, of which a mistake may change some
MOST = 64  # queries and keys that are looked at
RIDGE = 1e-9  # of what features have in common
_TINY = 1e-300


@dataclass(frozen=True)
class Sums:
    """``error`` [query, head, key or channel] of sums; what moved rows of the cache, and moved others, make of them.

    ``rows`` [key, head, dim] are the cache's, ``others`` what they are multiplied by; ``running``: the size of what
    rounding every partial sum leaves (None: nothing is summed); ``channels``: sums are over these, and not over keys.
    """

    error: Array
    rows: Array
    others: Array
    of_rows: Callable[[Array], Array]
    of_others: Callable[[Array], Array]
    running: Array | None = None
    channels: bool = False

    def looks(self, spread: Callable[[int], Array]) -> Looks:
        """The roundings of the cache that the error looks like; ``spread``: what moving all by a step makes of sums.

        A cache may have 4 bits; not where all of it shares a step, which outliers make large.
        """
        right = self.of_rows(self.rows)
        if is_steady(*(x.reshape(len(x), -1) for x in (self.error, right))) or self._goes_with_something(right):
            return {}
        found: Looks = {}
        for block in BLOCKS:
            usual, step = USUAL_OF_8 if block == TENSOR else USUAL, spread(block)
            look = even(np.inf, [(block, np.abs(self.error), step)], SUMMED, EVEN, usual)
            if look and self._is_as_even(block, step):
                found |= look
        return found

    def _goes_with_something(self, right: Array) -> bool:
        """Whether most of the error is what a mistake makes of rows, and only a little of one that was drawn."""
        cut = self.of_rows(np.sign(self.rows) * steps(self.rows, ROW))  # what cutting off does to all
        along = cut * ((self.error * cut).sum() / max(float(np.square(cut).sum()), _TINY))
        is_cut = float(np.square(along).sum()) > CUT * float(np.square(self.error).sum())
        errors = [self.error - along if is_cut else self.error, *self._drawn(ROW)]
        shares = (share(errors) for share in self._shares(right))
        return any(1 - own < LEFT * (1 - max(chance)) and max(chance) < TELLS for own, *chance in shares)

    def _is_as_even(self, block: int, step: Array) -> bool:
        """Whether the error is as even as rounding in such blocks."""
        own, *drawn = (self._unevenness(each, step) for each in (self.error, *self._drawn(block)))
        return bool((own <= FURTHER * np.max(drawn, axis=0)).all())

    def _drawn(self, block: int) -> Iterator[Array]:
        """Errors of rounding the rows, the others, both; of each value by itself, partial sums as well."""
        for draw in range(DRAWS):
            if block == OWN and self.running is not None:
                yield self.running * np.random.default_rng(draw).standard_normal(self.running.shape)
            rows = self.of_rows(steps(self.rows, block) * noise(self.rows, 1.0, draw))
            others = self.of_others(steps(self.others, block) * noise(self.others, 1.0, draw + DRAWS))
            yield from (rows, others, rows + others)

    def _shares(self, right: Array) -> Iterator[Callable[[Sequence[Array]], list[float]]]:
        """What a mistake may make of rows, each as a function that says how much of some errors it explains."""
        for axes in PARTS:
            yield partial(_shares_by_part, right, axes)
        yield partial(_shares_by_part, np.ones_like(right), (0,))
        beside = (moved_on(self.rows, 1, 0), moved_on(self.rows, -1, 0), np.roll(self.rows, 1, axis=1))
        sizes = np.abs(self.rows)
        edges = np.quantile(sizes, np.linspace(0, 1, SIZES + 1)[1:-1])
        by_size = [np.where(np.digitize(sizes, edges) == at, self.rows, 0.0) for at in range(SIZES)]
        for instead in (*([each] for each in beside), by_size):
            yield partial(_shares_of, np.stack([self.of_rows(each).reshape(-1) for each in instead]))
        if self.channels:
            for rows in (self.rows, np.ones_like(self.rows)):
                terms = np.einsum("thd,shd->dths", self.others, rows) * (right != 0)
                yield partial(_shares_of, terms.reshape(len(terms), -1))

    def _unevenness(self, error: Array, step: Array) -> Array:
        """How much an error in steps varies: over all values, and from one part to the next."""
        squares = np.square(np.divide(error, step, out=np.zeros_like(error), where=step > 0))
        there = (step > 0).astype(float)
        parts = ((squares.sum(axis=axes), there.sum(axis=axes)) for axes in ((), *PARTS))
        return np.array([_variation(*each) for each in parts])


def _variation(squares: Array, counts: Array) -> float:
    """The mean square of parts' mean squares, by their square: 1 of what is even."""
    total = max(float(counts.sum()), 1.0)
    mean = float(squares.sum()) / total
    means = np.divide(squares, counts, out=np.zeros_like(squares), where=counts > 0)
    return float((counts * np.square(means)).sum() / total) / max(mean * mean, _TINY)


def _shares_by_part(feature: Array, axes: Axes, errors: Sequence[Array]) -> list[float]:
    """How much of errors' squares a feature explains that has a factor of its own in each part."""
    sizes = np.maximum(np.square(feature).sum(axis=axes), _TINY)
    along = [float((np.square((each * feature).sum(axis=axes)) / sizes).sum()) for each in errors]
    return [part / max(float(np.square(each).sum()), _TINY) for part, each in zip(along, errors, strict=True)]


def _shares_of(features: Array, errors: Sequence[Array]) -> list[float]:
    """How much of errors' squares some features [feature, value] explain together."""
    flat = np.stack([each.reshape(-1) for each in errors], axis=1)
    along = features @ flat
    factors = np.linalg.lstsq(features @ features.T, along, rcond=RIDGE)[0]
    return list((along * factors).sum(axis=0) / np.maximum(np.square(flat).sum(axis=0), _TINY))


def of_scores(q: Array, k: Array, error: Array, seen: Array) -> Looks:
    """Of Q [query, head, dim] and K [key, head, dim] before their product; ``error`` [query, head, key].

    ``seen`` [query, key]: the keys of a query.
    """
    some, keys = (_some(n) for n in seen.shape)
    q, k, seen = q[some], k[keys], seen[np.ix_(some, keys)][:, None]
    error = error[some][:, :, keys] * seen

    def by_key(rows: Array) -> Array:
        return np.asarray(np.einsum("thd,shd->ths", q, rows) * seen)

    def by_query(others: Array) -> Array:
        return np.asarray(np.einsum("thd,shd->ths", others, k) * seen)

    def spread(block: int) -> Array:
        dq, dk = steps(q, block), steps(k, block)
        moved = np.einsum("thd,shd->ths", q * q, dk * dk) + np.einsum("thd,shd->ths", dq * dq, k * k)
        return np.asarray(np.sqrt(moved) * seen)

    terms = ((q[:, None, h] * k[None, :, h]) for h in range(q.shape[1]))
    running = np.stack([_running(each, axis=-1) for each in terms], axis=1) * seen
    return Sums(error, k, q, by_key, by_query, running, channels=True).looks(spread)


def of_values(p: Array, v: Array, error: Array) -> Looks:
    """Of V [key, head, dim] before it is weighed by p [head, query, key], or of these; ``error`` [query, head, dim]."""
    some = _some(p.shape[1])
    p, error = p[:, some], error[some]
    alone = _merged(p, v)

    def by_row(rows: Array) -> Array:
        return np.asarray(np.einsum("hts,shd->thd", p, rows))

    def by_weight(others: Array) -> Array:
        return np.asarray(np.einsum("hts,shd->thd", others, v))

    def spread(block: int) -> Array:
        return np.asarray(np.sqrt(np.einsum("hts,shd->thd", alone[0] ** 2, steps(alone[1], block) ** 2)))

    running = np.stack([_running(p[h, :, :, None] * v[None, :, h], axis=1) for h in range(len(p))], axis=1)
    looks = Sums(error, v, p, by_row, by_weight, running).looks(spread)
    terms = np.einsum("hts,shd->thd", p, np.abs(v))  # of one weight near one, rounding is a factor
    return looks or even(0.0, [(OWN, np.abs(error), terms)], CRUDE / 2, UNEVEN)


def _running(terms: Array, axis: int) -> Array:
    """The root of the squares of all partial sums."""
    return np.asarray(np.sqrt(np.square(np.cumsum(terms, axis=axis)).sum(axis=axis)))


def _some(count: int) -> Array:
    """So many queries or keys as are looked at."""
    return np.unique(np.linspace(0, count - 1, min(count, MOST)).astype(int))


def of_rows(rows: Array, error: Array) -> Looks:
    """Of a cache's rows [key, head, dim] themselves."""

    def same(moved: Array) -> Array:
        return moved

    return Sums(error, rows, rows, same, np.zeros_like).looks(lambda block: steps(rows, block))


def _merged(p: Array, v: Array) -> tuple[Array, Array]:
    """Weights [head, query, key] and values [key, head, dim] of keys that differ: rows that are alike err as one."""
    _, first, same = np.unique(v.reshape(len(v), -1), axis=0, return_index=True, return_inverse=True)
    order = np.argsort(same.reshape(-1), kind="stable")
    starts = np.searchsorted(same.reshape(-1)[order], np.arange(len(first)))
    return np.asarray(np.add.reduceat(p[..., order], starts, axis=-1)), v[first]
