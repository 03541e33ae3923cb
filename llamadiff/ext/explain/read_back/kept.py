"""Rows of a cache, K or V, as they were read: what was computed is linear in them, and tells what they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, permutations

import numpy as np

from llamadiff.ext.explain.alter import moved_on
from llamadiff.ext.explain.case import NotRecordedError
from llamadiff.ext.explain.pattern.deviation import counted, factor
from llamadiff.ext.explain.read_back.observed import Array, Facts, Observed, first_fit, sole
from llamadiff.ext.explain.read_back.rope import complex_pairs, real_pairs, turned_by
from llamadiff.judge.fact import Fact

Rows = Iterator[tuple[Array, Fact]]  # what would have been read, and what is said if it was
NONE = -1  # in place of a row
PAGES, MOST_PAGES = (4, 8, 16, 32, 64, 128, 256), 16  # rows of a page; pages of a size that are tried
MOST_VALUES = 1 << 21  # that are computed anew for each pair of pages
FEW = 8  # rows or channels that are named
ENOUGH = 1e-3  # of an error, that may be left
NEAR = 1e-3  # of a factor: so far may those of some places be apart
MOST_WORK = 3e10  # multiply-adds
TRIED = 48  # limits that are tried first
FINER = 24  # times that the steps between them are halved
WHOLE: dict[str, Callable[[Array], Array]] = {
    "to the nearest whole number": np.rint,
    "to whole numbers, towards zero": np.trunc,
    "down to whole numbers": np.floor,
}


def kept(o: Observed) -> Facts:
    """What was put into a cache [key, head, dim] instead of its rows."""
    side = o.case.tap.kind.word[-1].upper()
    if o.recorded.ndim == 3:
        yield from first_fit(o.fits, _turned(o, side), changed(side, o.expected, lambda rows: rows, o.recorded))


def _turned(o: Observed, side: str) -> Rows:
    """Rows rotated by their positions, as RoPE turned K's of a layer that has it."""
    for layer in range(o.case.run.model.n_layer):
        try:
            before, after = (o.values(f"{word}-{layer}") for word in ("Kcur_proj", "Kcur_rope"))
        except NotRecordedError:
            continue
        if before.size != o.expected.size or after.size != o.expected.size:
            continue
        for in_pairs in (True, False):
            x, y, rows = (complex_pairs(np.asarray(each, np.float64).reshape(o.expected.shape), o.expected.shape[-1],
                                        in_pairs) for each in (before, after, o.expected))  # fmt: skip
            says = f"{side}'s rows are rotated by their positions, as those of layer {layer} are"
            yield real_pairs(rows * turned_by(x, y)[:, None], in_pairs), Fact(f"{side} turned", says, (layer,))


def pages(side: str, count: int, values: int) -> Iterator[tuple[Array, Fact]]:
    """Pages of a cache that are read in place of others: the row that each of so many keys reads, or NONE.

    ``values``: how many are computed for each.
    """
    for size in PAGES:
        if not 1 < -(-count // size) <= MOST_PAGES or values > MOST_VALUES:
            continue
        starts = range(0, count, size)
        for page, other in permutations(starts, 2):
            rows = np.arange(count)
            last = min(page + size, count) - 1
            moved = rows[page : last + 1] + other - page
            rows[page : last + 1] = np.where(moved < count, moved, NONE)
            says = f"in place of {side}'s rows {page} to {last} it reads those from row {other} on"
            yield rows, Fact(f"{side} page", says, (page, last, other))


def changed(side: str, rows: Array, made: Callable[[Array], Array], recorded: Array) -> Rows:
    """What ``side``, K or V, may have been instead of ``rows`` [key, head, dim], if what is ``made`` of that was
    recorded; the likeliest first.
    """
    keys, heads, dim = rows.shape
    if recorded.size * max(keys, dim) * (keys + heads + dim + 3 * TRIED) > MOST_WORK:
        return
    error = (recorded - made(rows)).reshape(-1)
    yield from _factors(side, rows, made, error)
    yield from _narrower(side, rows, made, recorded)
    yield from _beside(side, rows, made, error)
    yield from _added(side, rows, made, error)
    for words, whole in WHOLE.items():
        yield whole(rows), Fact(f"{side} whole", f"it reads {side} rounded {words}", (words,))
    yield from _limited(side, rows, made, recorded)


def _solved(features: Sequence[Array], error: Array) -> Array:
    """By how much of a FEW features an error comes about, each being the one that explains most of what is left.

    The others are zero; all are where a few explain too little.
    """
    flat = np.stack([each.reshape(-1) for each in features])
    sizes, found, some, left = np.sqrt(np.square(flat).sum(axis=1)), np.zeros(len(flat)), list[int](), error
    while len(some) < min(FEW, len(flat)):
        some.append(int(np.argmax(np.abs(flat @ left) / np.maximum(sizes, 1e-300))))
        parts = np.linalg.lstsq(flat[some].T, error, rcond=None)[0]
        left = error - parts @ flat[some]
        if float(left @ left) <= ENOUGH * float(error @ error):
            found[some] = parts
            break
    return found


def _along(axis: int, values: Array) -> Array:
    """Values of heads, channels or rows, to be multiplied by rows [key, head, dim]."""
    shape = [1, 1, 1]
    shape[axis] = -1
    return values.reshape(shape)


def _parts(rows: Array, axis: int) -> list[Array]:
    """The rows with all but one head, or channel, or row set to zero."""
    places = np.arange(rows.shape[axis])
    return [np.where(_along(axis, places == at), rows, 0.0) for at in places]


def _factors(side: str, rows: Array, made: Callable[[Array], Array], error: Array) -> Rows:
    """A factor of a head, of a channel in every head, of a row."""
    for axis, what in ((1, "head"), (2, "channel"), (0, "row")):
        more = _solved([made(each) for each in _parts(rows, axis)], error)
        places = np.flatnonzero(more)
        times = sole(1 + more[places], NEAR)
        if times is not None:
            says = f"it reads {side}'s {counted(what, places)} times {factor(times)}"
            changes = np.where(more != 0, times, 1.0)
            yield rows * _along(axis, changes), Fact(f"{side} {what} factor", says, (times, *map(int, places)))


def _narrower(side: str, rows: Array, made: Callable[[Array], Array], recorded: Array) -> Rows:
    """The last channels of all heads left out: those that leave least."""
    dim = rows.shape[-1]
    channel = np.arange(dim)
    left = [float(np.square(recorded - made(np.where(channel < n, rows, 0.0))).sum()) for n in range(1, dim)]
    if left:
        n = int(np.argmin(left)) + 1
        says = f"it reads the first {n} of {side}'s {dim} channels alone"
        yield np.where(channel < n, rows, 0.0), Fact(f"{side} narrower", says, (n, dim))


def _beside(side: str, rows: Array, made: Callable[[Array], Array], error: Array) -> Rows:
    """A part of the row before, or after, or of the head before, which is added."""
    others = {
        "the row before": moved_on(rows, 1, 0),
        "the row after": moved_on(rows, -1, 0),
        "the head before": np.roll(rows, 1, axis=1),
    }
    for words, other in others.items():
        part = float(_solved([made(other)], error)[0])
        says = f"{part:.4g} times {words} is added to each row of {side} that it reads"
        yield rows + part * other, Fact(f"{side} beside", says, (part, words))


def _added(side: str, rows: Array, made: Callable[[Array], Array], error: Array) -> Rows:
    """Something that is added to a channel of all heads and rows."""
    added = _solved([made(each) for each in _parts(np.ones_like(rows), 2)], error)
    places = np.flatnonzero(added)
    if len(places):
        said = ", ".join(f"{each:.4g}" for each in added[places])
        says = f"{said} is added to {side}'s {counted('channel', places)}, in all heads"
        yield rows + added, Fact(f"{side} added", says, (*map(int, places), *map(float, added[places])))


def _limited(side: str, rows: Array, made: Callable[[Array], Array], recorded: Array) -> Rows:
    """Values that are cut off beyond a limit, or read as zeros below one."""
    ways: dict[str, Callable[[float], Array]] = {
        "limits the values of {} to {:.4g}": lambda limit: np.clip(rows, -limit, limit),
        "reads zeros for the values of {} that are below {:.4g}": lambda limit: np.where(
            np.abs(rows) < limit, 0.0, rows
        ),
    }
    sizes = np.abs(rows[rows != 0])
    for says, way in ways.items() if len(sizes) else ():

        def left(limit: float, way: Callable[[float], Array] = way) -> float:
            return float(np.square(recorded - made(way(limit))).sum())

        tried = {limit: left(limit) for limit in np.quantile(sizes, np.linspace(0.002, 0.998, TRIED))}
        for _ in range(FINER):
            known = sorted(tried)
            at = known.index(min(tried, key=tried.__getitem__))
            near = known[max(at - 1, 0) : at + 2]
            tried |= {middle: left(middle) for middle in (sum(pair) / 2 for pair in pairwise(near))}
        limit = min(tried, key=tried.__getitem__)
        yield way(limit), Fact(f"{side} limit", f"it {says.format(side, limit)}", (limit,))
