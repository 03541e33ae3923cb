"""What wrong values are instead of the right ones: zero, another's, in another order, multiplied, shifted, turned.

Of all of a tap; or of some channels or heads of it, where the others are right.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.ext.explain.pattern.deviation import LEFT, SAME, Deviation, are, counted, factor, listed
from llamadiff.ext.file.orders import order_in_words
from llamadiff.judge.fact import Fact
from llamadiff.numerics import metrics

Array = NDArray[Any]

EVERYWHERE = 1e-3  # of an error, that one factor may leave which is said to be everywhere
MOVED = 1000.0  # how many times nearer sorting brings values that are in another order
MOST_ROWS, MOST_CHANNELS = 512, 4096  # that are matched with one another
NEARLY = 0.9  # of the tokens whose other was looked at, that must bear out a step
LEAST_ROWS = 3  # by which a channel is known again among thousands
STRANGE = 1e-2  # of a channel's size, that it may differ by from the one whose values it has


def zeros(d: Deviation) -> Iterator[Fact]:
    """Values that nobody wrote."""
    empty = ~d.recorded.reshape(len(d.recorded), -1).any(axis=1)
    wanted = d.expected.reshape(len(d.expected), -1).any(axis=1)
    rows = np.flatnonzero(empty & wanted).tolist()
    if len(rows) == wanted.sum() > 0:
        yield Fact("zero", "all of its values are zero")
    elif len(rows):
        yield Fact("zero", f"{counted('token', rows)} {are(rows)} all zero", tuple(rows))


def another_tensor(d: Deviation) -> Iterator[Fact]:
    """The first of the others that has these values."""
    if not d.finite or not d.recorded.any():
        return
    shape = np.moveaxis(d.recorded, 0, d.tap.row_axis).shape
    for name, other in d.others.items():
        if other.size == d.recorded.size and d.explained_by(np.moveaxis(other.reshape(shape), d.tap.row_axis, 0)):
            yield Fact("equals", f"the values are those of {name}", (name,))
            return


def other_axes(d: Deviation) -> Iterator[Fact]:
    """Values written with two axes swapped: what lies in memory is another order of axes than the tap's."""
    names, shape = d.axes
    if len(names) != len(shape) or d.tap.causal or not d.finite:
        return
    for first, second in combinations(range(len(names)), 2):
        order = list(range(len(names)))
        order[first], order[second] = second, first
        written = np.ascontiguousarray(d.expected.reshape(shape).transpose(order))
        if d.explained_by(written.reshape(d.expected.shape)):
            was = ", ".join(names[axis] for axis in order)
            yield Fact("axes", f"it was written as [{was}], where [{', '.join(names)}] is right", tuple(order))
            return


def other_rows(d: Deviation) -> Iterator[Fact]:
    """Tokens that have the values of other tokens: all that are wrong, or those whose other was looked at."""
    n = len(d.recorded)
    if not d.finite or not 1 < n <= MOST_ROWS or not d.bad_rows.any():
        return
    near = _distances(d.recorded.reshape(n, -1), d.expected.reshape(n, -1))
    source = np.where(d.bad_rows, near.argmin(axis=1), np.arange(n))
    if (near[np.arange(n), source] > SAME)[d.bad_rows].any() or not d.explained_by(d.expected[source]):
        if d.has_gaps:
            yield from _as_far_as_seen(d, near)
        return
    moved = np.flatnonzero(source != np.arange(n))
    steps = source[moved] - moved
    if len(moved) > 1 and len(moved) >= n - 1 and (steps == steps[0]).all() and not d.has_gaps:
        says = f"every token has the values of the one {_steps(int(steps[0]))} it"
    else:
        says = listed([f"token {i} has the values of token {source[i]}" for i in moved])
    yield Fact("rows", says, tuple(int(i) for i in source))


def _as_far_as_seen(d: Deviation, near: Array) -> Iterator[Fact]:
    """Wrong tokens that have the values of others, where those of some were not looked at.

    One step back or on, if nearly all whose other was looked at bear it out; or else each for itself.
    """
    positions = np.array(d.positions)
    step = positions[None, :] - positions[:, None]
    wrong = d.bad_rows & (near.diagonal() > SAME)
    comparable = wrong[:, None] & (step != 0) & ~_alike(d.expected)
    matches = comparable & (near <= SAME)
    counts = {
        int(by): (int((matches & (step == by)).sum()), int((comparable & (step == by)).sum()))
        for by in np.unique(step[matches])
    }
    supported = {by: found for by, (found, seen) in counts.items() if found >= max(LEAST_ROWS, NEARLY * seen)}
    moved = np.flatnonzero(matches.any(axis=1))
    if supported:
        by = max(supported, key=lambda each: (supported[each], -abs(each)))
        which = (
            f"the {supported[by]} wrong tokens"
            if supported[by] == wrong.sum()
            else f"{supported[by]} of {wrong.sum()} wrong tokens"
        )
        yield Fact("rows", f"{which} have the values of the one {_steps(by)} them", (by, supported[by]))
    elif len(moved) >= LEAST_ROWS:
        source = np.where(matches, near, np.inf).argmin(axis=1)
        each = listed([f"token {i} those of token {source[i]}" for i in moved])
        says = f"{len(moved)} of {wrong.sum()} wrong tokens have the values of others: {each}"
        yield Fact("rows", says, (*map(int, moved), *map(int, source[moved])))


def _alike(x: Array) -> Array:
    """Which rows are one another's likes: [row, row]."""
    flat = x.reshape(len(x), -1)
    return _distances(flat, flat) <= SAME


def _steps(by: int) -> str:
    """``before``, ``3 after``."""
    return f"{abs(by)} {'before' if by < 0 else 'after'}" if abs(by) > 1 else "before" if by < 0 else "after"


def other_channels(d: Deviation) -> Iterator[Fact]:
    """Channels that have the values of other channels, the same in every token; or values in any other order."""
    n = len(d.recorded)
    r, e = (x.reshape(n, -1) for x in (d.recorded, d.expected))
    if not d.finite or d.tap.causal:
        return
    if n >= LEAST_ROWS and r.shape[1] <= MOST_CHANNELS:
        source = _distances(r.T, e.T).argmin(axis=1)
        source = np.where(d.bad.reshape(n, -1).any(axis=0), source, np.arange(r.shape[1]))
        if len(set(source)) == len(source) and d.explained_by(e[:, source].reshape(d.expected.shape)):
            heads = d.axes[1][1] if len(d.axes[1]) == 3 else 0
            yield Fact("channel order", order_in_words(source, "channel", heads), tuple(int(i) for i in source))
            return
    apart, together = metrics.nmse(r, e, 0), metrics.nmse(np.sort(r, axis=1), np.sort(e, axis=1), 0)
    if together < SAME and together * MOVED < apart:
        yield Fact("sorted", "every token has the right values in another order")


def factors(d: Deviation) -> Iterator[Fact]:
    """One factor everywhere, or one for each token, or one for each token and head."""
    if not d.finite or not d.recorded.any():
        return
    for axes, kind, whose in _sharing(d):
        found = _quotients(d, axes)
        if found is None or not d.explained_by(found * d.expected, EVERYWHERE if kind == "ratio" else LEFT):
            continue
        low, high = float(found.min()), float(found.max())
        says = f"each {whose} has a factor of its own, from {factor(low)} to {factor(high)}"
        if kind == "ratio":
            says = f"it is {factor(low)} times what it should be, everywhere"
        yield Fact(kind, says, tuple(map(float, found.flat)))
        return


def _sharing(d: Deviation) -> Iterator[tuple[tuple[int, ...], str, str]]:
    """Over which axes a factor may be the same, and what to call those that share it."""
    axes = tuple(range(d.recorded.ndim))
    yield axes, "ratio", ""
    if len(d.recorded) > 1 and d.recorded[0].size > 1:
        yield axes[1:], "row factor", "token"
    if d.recorded.ndim == 3 and d.recorded.shape[1] > 1 and d.recorded.shape[2] > 2:
        yield axes[2:], "head factor", f"{d.part} of each token"


def _quotients(d: Deviation, axes: tuple[int, ...]) -> Array | None:
    """The factors that fit best, or None where there is nothing to divide by."""
    size = np.square(d.expected).sum(axis=axes, keepdims=True)
    if not size.all():
        return None
    return np.asarray((d.recorded * d.expected).sum(axis=axes, keepdims=True) / size)


def shifts(d: Deviation) -> Iterator[Fact]:
    """One constant everywhere, or one vector in every token."""
    if not d.finite:
        return
    gap = d.recorded - d.expected
    offset = float(gap.mean())
    if offset and d.explained_by(d.expected + offset):
        yield Fact("offset", f"it is off by the constant {offset:.4g}", (offset,))
    elif len(gap) > 1 and d.explained_by(d.expected + gap.mean(axis=0)):
        yield Fact("vector", "every token is off by the same vector, as when a bias is dropped")


def parts(d: Deviation) -> Iterator[Fact]:
    """The wrong channels of a tap with rows of channels, or the wrong heads of one with rows of heads."""
    if d.tap.causal or not d.finite or d.recorded.ndim not in (2, 3):
        return
    flags = np.asarray(d.bad.reshape(*d.bad.shape[:2], -1).any(axis=(0, 2)))
    wrong = np.flatnonzero(flags).tolist()
    if not 0 < len(wrong) < len(flags):
        return
    rows = np.flatnonzero(d.bad_rows).tolist()
    region = np.zeros(d.bad.shape, bool)
    region[np.ix_(d.bad_rows, flags)] = True
    whose = f" in {counted('token', rows)}" if len(rows) < len(d.bad) else ""
    said = _values(d, region, d.part, wrong)
    if said is not None:
        says = f"{counted(d.part, wrong)} {said.says}{whose}"
        yield Fact(said.kind, says, (len(rows), *rows, *wrong, *said.values))


def _values(d: Deviation, region: Array, what: str, wrong: list[int]) -> Fact | None:
    """What the values of the region are, in words that follow its name."""
    if not d.recorded[region].any():
        return Fact("part zero", f"{are(wrong)} all zero") if d.expected[region].any() else None
    right, found = d.expected[region], d.recorded[region]
    times = float((right * found).sum() / max(float(np.square(right).sum()), 1e-300))
    several = len(right) > 1  # one value is any other one times something
    if times and several and d.explained_by(np.where(region, times * d.expected, d.expected)):
        they = "they" if len(wrong) > 1 else "it"
        return Fact("part factor", f"{are(wrong)} {factor(times)} times what {they} should be", (times,))
    step = _shift(d, wrong)
    if step:
        values = np.where(region, np.roll(d.expected, step, axis=1), d.expected)
        if d.explained_by(values):
            sources = [i - step for i in wrong]
            verb = "have" if len(wrong) > 1 else "has"
            return Fact("part of another", f"{verb} the values of {counted(what, sources)}", (step,))
    return None


def _shift(d: Deviation, wrong: list[int]) -> int:
    """How far from the first wrong channel, or head, the one is whose values it has; 0: nowhere."""
    n = d.recorded.shape[1]
    if len(d.recorded) < LEAST_ROWS or n > MOST_CHANNELS:
        return 0
    one = d.recorded[:, wrong[0]][:, None]
    gaps = np.square(one - d.expected).reshape(len(one), n, -1).sum(axis=(0, 2))
    source, size = int(gaps.argmin()), float(np.square(one).sum())
    step = wrong[0] - source
    inside = all(0 <= i - step < n for i in wrong)
    return step if inside and gaps[source] <= STRANGE**2 * size else 0


def _distances(a: Array, b: Array) -> Array:
    """NMSE of every row of ``a`` against every row of ``b``."""
    sizes = np.square(b).sum(axis=1)
    squares = np.square(a).sum(axis=1)[:, None] + sizes - 2 * (a @ b.T)
    return np.asarray(np.maximum(squares, 0.0) / np.maximum(sizes, 1e-300))
