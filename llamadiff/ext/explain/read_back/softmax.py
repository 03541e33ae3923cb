"""A softmax read back: within a row the logarithms of what is seen are the scores times one factor, up to a constant.

The factor is the scale; what is missing is the mask; and how far a row is from one says what its sum was.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from llamadiff.ext.explain.pattern.deviation import numbered
from llamadiff.ext.explain.read_back.observed import (
    LEFT,
    Array,
    Facts,
    Observed,
    Readings,
    factor_of,
    first_fit,
    sole,
    strictly,
)
from llamadiff.judge.fact import Fact

TINY = 1e-30  # probabilities below which nothing is read from
WANTED = 1e-9  # a right probability of which a zero is a finding
CLOSE = 1e-3  # of a factor, that two may differ by and be one
SUMS = 1e-4  # of a sum, likewise
SOLVED = 1e-3  # of a row's sum, what solving may leave of a probability
FEW = 4  # keys that are named, each with its queries


@dataclass(frozen=True)
class SoftmaxRows:
    """Scores, recorded and right probabilities [head, query, key]; a router's have one head. ``seen``: by the right."""

    o: Observed
    scores: Array
    p: Array
    right: Array
    seen: Array
    keys: str  # what the last axis runs over
    told: Array  # queries whose probabilities are known
    may_leave: float = LEFT

    def fits(self, p: Array) -> bool:
        return self.left(p) <= self.may_leave

    def left(self, p: Array) -> float:
        """What of the error is left if these are the probabilities."""
        return self.o.left(p)

    @cached_property
    def there(self) -> Array:
        """What has a probability that can be read from."""
        return self.seen & (self.p > TINY)

    @cached_property
    def scale(self) -> float:
        """What the right softmax multiplies scores by."""
        slopes, sure = _slopes(self.scores, self.right, self.seen & (self.right > TINY))
        return float(np.median(slopes[sure])) if sure.any() else 0.0

    def normalised(self, scale: Any, there: Array) -> Array:
        """exp of the scaled scores over their row's sum; zero where nothing is seen."""
        x = np.where(there, self.scores * scale, -np.inf)
        return _shares(np.where(there, np.exp(x - x.max(axis=-1, keepdims=True, initial=-1e300)), 0.0))


def _shares(powers: Array) -> Array:
    return np.asarray(powers / np.maximum(powers.sum(axis=-1, keepdims=True), 1e-300))


def _logs(p: Array, there: Array) -> Array:
    """Logarithms of what is there; zero elsewhere."""
    return np.where(there, np.log(np.where(there, p, 1.0)), 0.0)


def _centred(x: Array, there: Array) -> Array:
    """What is there, less its mean in each row; zero elsewhere."""
    count = np.maximum(there.sum(axis=-1, keepdims=True), 1)
    return np.where(there, x - (x * there).sum(axis=-1, keepdims=True) / count, 0.0)


def softmax(o: Observed) -> Facts:
    """The scale, the mask and the sum of a softmax."""
    s = _parts(o)
    if s is None or (s.p < 0).any() or not s.there.any():
        return
    leaks = tuple(first_fit(s.fits, _leaks(s))) if o.case.tap.causal else ()
    if leaks:
        yield from leaks
        return
    hidden = s.seen & (s.p == 0) & (s.right > WANTED)
    if o.shown is not None:
        yield from _of_some_rows(s, hidden)
        return
    yield from _unseen(s, hidden)
    there = s.there
    slopes, sure = _slopes(s.scores, s.p, there)
    total = s.p.sum(axis=-1, keepdims=True)
    rebuilt = np.where(sure, slopes, s.scale)[..., None]
    left = s.left(s.normalised(rebuilt, there) * total)
    if left > LEFT:
        yield from first_fit(s.fits, _distances(s, there, total), _by_blocks(s, there, total))
        return
    s = replace(s, may_leave=strictly(left))
    yield from _scales(s, slopes, sure)
    if sole(total, SUMS) is None or abs(float(np.median(total)) - 1) > SUMS:
        yield from first_fit(s.fits, _sums(s, s.normalised(rebuilt, there), total))


def _of_some_rows(s: SoftmaxRows, hidden: Array) -> Facts:
    """The same where probabilities were solved for, and of some queries could not be."""
    if hidden.any():
        nearest = [int(np.abs(np.flatnonzero(s.told) - query).argmin()) for query in range(len(s.told))]
        as_neighbours = hidden[:, np.flatnonzero(s.told)[nearest]] & s.seen
        for some in (as_neighbours, s.seen & (_below(s) >= _below(s)[hidden].min())):
            there = s.seen & ~some
            if s.fits(s.normalised(s.scale, there)) or s.fits(np.where(there, s.right, 0.0)):
                yield from _unseen(replace(s, p=np.where(there, s.right, 0.0)), some)
                return
    slopes, sure = _slopes(s.scores, s.p, s.there)
    of = [row & s.told for row in sure]
    scales = np.array([np.median(row[some]) if some.any() else s.scale for row, some in zip(slopes, of, strict=True)])
    p, total = s.normalised(scales[:, None, None], s.seen), s.p.sum(axis=-1, keepdims=True)
    if s.fits(p):
        yield from _scales(s, np.broadcast_to(scales[:, None], slopes.shape), sure)
    elif abs(float(np.median(total[:, s.told])) - 1) > SUMS:
        yield from first_fit(s.fits, _sums(s, p, total))
    else:
        yield from first_fit(s.fits, _distances(s, s.seen, np.ones_like(total)))


def _parts(o: Observed) -> SoftmaxRows | None:
    """The rows of a softmax; None where the right values are none of the scores."""
    causal, scores = o.case.tap.causal, o.input()
    shape = o.recorded.shape if causal else (1, *o.recorded.reshape(-1, o.recorded.shape[-1]).shape)
    scores, p, right = (side.reshape(shape) for side in (scores, o.recorded, o.expected))
    positions = o.case.run.positions
    seen = np.broadcast_to(positions[None, :] <= o.positions[:, None] if causal else np.True_, shape)
    if o.shown is not None:
        p = _without_noise(p, right)
    told = (p != right).any(axis=(0, 2)) | (o.shown is None)
    keys = "key" if causal else "expert"
    s = SoftmaxRows(o, np.where(seen, scores, 0.0), p, right, seen & (right > 0), keys, told)
    return s if o.is_right(s.normalised(s.scale, s.seen), 1e-9) else None


def _without_noise(p: Array, right: Array) -> Array:
    """Probabilities that were solved for: what is none is zero or, where that may be, right; so is a row of others."""
    p = np.where(np.abs(p) > SOLVED, p, np.where(right > 10 * SOLVED, 0.0, right))
    return np.where((p < 0).any(axis=-1, keepdims=True), right, p)


def _slopes(scores: Array, p: Array, there: Array) -> tuple[Array, Array]:
    """Each row's factor of the scores in the logarithms, and whether it has enough keys to tell."""
    x = _centred(scores, there)
    spread = np.square(x).sum(axis=-1)
    sure = (there.sum(axis=-1) > 1) & (spread > 1e-9 * max(float(np.square(scores).mean()), 1e-300))
    return factor_of(x, _logs(p, there), axis=-1), sure


# -- the mask ------------------------------------------------------------------------------------------------------


def _unseen(s: SoftmaxRows, hidden: Array) -> Facts:
    """Keys that should have a probability and have none."""
    if not hidden.any():
        return
    gap = _below(s)
    least, most = float(gap[hidden].min()), float(gap[s.there].max())
    if most < least:
        bound = _between(most, least)
        says = f"{s.keys}s whose scaled score is more than {bound:.4g} below the row's largest get nothing"
        yield Fact("cut", says, (bound,))
        return
    heads = np.flatnonzero(hidden.any(axis=(1, 2)))
    if s.keys != "key" or (hidden[heads] != hidden[heads[0]]).any():
        return
    whose = f", in heads {numbered(heads)}" if len(heads) < len(hidden) else ""
    yield from _queries(hidden[heads[0]], s.o.rows, whose)


def _leaks(s: SoftmaxRows) -> Readings:
    """Keys after a query that have a probability: the score that they are given, or what is added to theirs."""
    positions = s.o.case.run.positions
    raw = s.o.raw.reshape(s.p.shape)
    hidden = np.broadcast_to(positions[None, :] > s.o.positions[:, None], s.p.shape)
    found = hidden & (raw > TINY)
    if not found.any() or not np.isfinite(raw).all():
        return
    own, scaled = np.where(s.seen, s.scale * s.scores, 0.0), s.scale * s.o.input().reshape(s.p.shape)
    count = np.maximum(s.there.sum(axis=-1, keepdims=True), 1)
    sums = np.where(s.there, own - _logs(s.p, s.there), 0.0).sum(axis=-1, keepdims=True) / count
    scores = np.where(found, _logs(raw, found) + sums, 0.0)  # of what is hidden
    for words, rest in (("have the score {}", np.zeros_like(scaled)), ("have {} added to their scores", scaled)):
        value = sole((scores - rest)[found], CLOSE * max(1.0, float(np.abs(scores[found]).max())))
        if value is None:
            continue
        terms = np.where(s.seen, np.exp(own), 0.0)
        total = terms.sum(axis=-1) + np.where(hidden, np.exp(value + rest), 0.0).sum(axis=-1)
        says = f"keys after a query are not hidden: they {words.format(f'{value:.4g}')}"
        yield terms / total[..., None], Fact("leaks", says, (value,))


def _below(s: SoftmaxRows) -> Array:
    """How far scaled scores are below the largest of their row."""
    x = np.where(s.seen, s.scores * s.scale, -np.inf)
    return np.asarray(np.where(s.seen, x.max(axis=-1, keepdims=True) - x, 0.0))


def _between(low: float, high: float) -> float:
    """The shortest number between two."""
    for digits in range(1, 5):
        value = float(f"{(low + high) / 2:.{digits}g}")
        if low <= value < high:
            return value
    return low


def _queries(hidden: Array, rows: Array, whose: str) -> Facts:
    """Which queries do not see which keys: ``hidden`` [query, key] of the queries ``rows``."""
    keys = np.flatnonzero(hidden.any(axis=0))
    windows = [rows[q] - np.flatnonzero(hidden[q]).max() for q in range(len(hidden)) if hidden[q].any()]
    near, far = rows[:, None], np.arange(hidden.shape[1])
    if len(set(windows)) == 1 and (hidden == (near - far >= windows[0])).all() and windows[0] > 0:
        yield Fact("window", f"queries see no more than the last {windows[0]} keys{whose}", (int(windows[0]),))
    elif (lag := int(hidden.sum(axis=1).max())) and (hidden == (far > near - lag) & (far <= near)).all():
        says = f"queries do not see the last {lag} keys, their own among them{whose}"
        yield Fact("lag", says, (lag,))
    elif len(keys) <= FEW:
        for key in keys:
            queries = [int(q) for q in rows[hidden[:, key]]]
            quer = f"quer{'ies' if len(queries) > 1 else 'y'} {numbered(queries)}"
            yield Fact("unseen", f"key {key} is not seen by {quer}{whose}", (int(key), *queries))


# -- the scale -----------------------------------------------------------------------------------------------------


def _scales(s: SoftmaxRows, slopes: Array, sure: Array) -> Facts:
    """What scores are multiplied by, where it is not what is right: everywhere, in each head, or in each row."""
    if (np.abs(slopes - s.scale)[sure] <= CLOSE * abs(s.scale)).all():
        return
    right = f"where {s.scale:.4g} is right"
    heads = [sole(slopes[h][sure[h]], CLOSE * abs(s.scale)) for h in range(len(slopes))]
    own = [value for value in heads if value is not None]
    if len(own) < len(heads):
        values = slopes[sure]
        bounds = f"from {values.min():.4g} to {values.max():.4g}"
        says = f"each row multiplies scores by a factor of its own, {bounds}, {right}"
        yield Fact("row scales", says, tuple(float(v) for v in values))
    elif len(own) == 1 or sole(np.array(own), CLOSE * abs(s.scale)) is not None:
        yield Fact("scale", f"scores are multiplied by {own[0]:.4g}, {right}", (own[0],))
    else:
        said = ", ".join(f"{value:.{4 if s.o.shown is None else 3}g}" for value in own)
        says = f"scores are multiplied by {said} in heads 0 to {len(own) - 1}, {right}"
        yield Fact("head scales", says, tuple(own))


def _distances(s: SoftmaxRows, there: Array, total: Array) -> Readings:
    """Scores with something added that grows with the distance from key to query."""
    if s.keys != "key" or not s.scale:
        return
    query, key = s.o.rows[:, None], np.arange(s.p.shape[2])
    away, read = np.broadcast_to(query - key, s.p.shape), there & s.told[:, None] & (s.p > TINY)
    rest, x = np.where(read, _logs(s.p, read) - s.scale * s.scores, 0.0), _centred(away, read)
    slopes = np.array([float(factor_of(*of_head)) for of_head in zip(x, rest, strict=True)])
    shifted = replace(s, scores=s.scores + slopes[:, None, None] * away / s.scale)
    values = ", ".join(f"{value:.4g}" for value in slopes)
    says = f"to scores is added the distance from key to query times {values} in heads 0 to {len(slopes) - 1}"
    yield shifted.normalised(s.scale, there) * total, Fact("distance", says, tuple(float(v) for v in slopes))


def _by_blocks(s: SoftmaxRows, there: Array, total: Array) -> Readings:
    """Powers below the largest score of a block of keys, which are not scaled down where a later one is larger."""
    x = np.where(there, s.scores * s.scale, -np.inf)
    keys = x.shape[-1]
    for block in range(1, keys):
        starts = np.arange(0, keys, block)
        most = np.repeat(np.maximum.reduceat(x, starts, axis=-1), block, axis=-1)[..., :keys]
        named = f"{s.keys}{'s' if block > 1 else ''}"
        says = f"each block of {block} {named} is scaled by its own largest score, and not by the row's"
        powers = np.where(there, np.exp(x - np.where(np.isfinite(most), most, 0.0)), 0.0)
        yield _shares(powers), Fact("by blocks", says, (block,))


# -- the sum -------------------------------------------------------------------------------------------------------


def _sums(s: SoftmaxRows, p: Array, total: Array) -> Readings:
    """What the sum left out, or had too much: ``p`` are the probabilities made to sum to one."""
    several = (p > 0).sum(axis=-1, keepdims=True) > 1
    for words, part in _parts_of_sums(s, p):
        for spared, what in ((np.zeros_like(several), ""), (~several, f", where there is another {s.keys}")):
            left = np.where(spared, 1.0, 1 - part)
            if (left > 0).all() and not spared.all():
                yield p / left, Fact("sum lacks", f"its sum leaves out {words}{what}", (words,))
    more = 1 / np.maximum(total, 1e-300) - 1  # in units of the right sum
    largest = p.max(axis=-1, keepdims=True)
    counts = (more / np.maximum(largest, 1e-300))[:, s.told]
    count = sole(counts, CLOSE * max(1.0, float(np.median(np.abs(counts)))))
    if count is not None:
        says = f"its sum is {count:.4g} too large, where the largest term is 1"
        yield p / (1 + count * largest), Fact("sum plus", says, (count,))
    yield from _counted(s, p, more)


def _parts_of_sums(s: SoftmaxRows, p: Array) -> Iterator[tuple[str, Array]]:
    """Terms that a sum may leave out, each row's as a part of its sum."""
    if s.keys == "key":
        own = s.o.rows[:, None] == np.arange(p.shape[2])
        yield "each query's own key", np.where(own, p, 0.0).sum(axis=-1, keepdims=True)
    yield f"the first {s.keys}", p[..., :1]
    yield "the largest term", p.max(axis=-1, keepdims=True)
    if s.keys != "key":
        yield f"the last {s.keys}", p[..., -1:]


def _counted(s: SoftmaxRows, p: Array, more: Array) -> Readings:
    """Keys with a score of zero that the sum counts too: as many in each row, or so many that all rows have as many."""
    top = np.where(s.there, s.scores * s.scale, -np.inf).max(axis=-1, keepdims=True)
    each, seen = p.max(axis=-1, keepdims=True) * np.exp(-top), s.there.sum(axis=-1, keepdims=True)
    count = more / np.maximum(each, 1e-300)
    every, room = sole(count[:, s.told], 1e-2), sole((count + seen)[:, s.told], 1e-2)
    if every is not None and every > 0.5:
        says = f"its sum counts {every:.0f} more with a score of 0"
        yield p / (1 + np.rint(every) * each), Fact("sum counts", says, (int(np.rint(every)),))
    if room is not None:
        says = f"its sum counts {room:.0f} {s.keys}s in every row, those that are not there with a score of 0"
        yield p / (1 + (np.rint(room) - seen) * each), Fact("sum room", says, (int(np.rint(room)),))
