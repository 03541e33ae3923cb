"""Is a dump what a run gave: to rounding, or by one factor and one summand for each channel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
UNITS = {"f32": 2.0**-22, "f16": 2.0**-11, "bf16": 2.0**-8}  # of a value, what keeping it as such may change
ENOUGH = 100  # values that a line is drawn through
NEAR = 0.03  # of how a dump's values vary, what a line may leave to be called one
MOST_OF = 0.9  # of the squares of what a dump is off by
HIDDEN = 0.5  # of a dump's values above its floor, the least that are above a run's, too
BIAS = 0.25  # levels: rounding to the nearest leaves none on average, cutting off leaves a half


@dataclass(frozen=True)
class Allowed:
    """What rounding may do. ``most``: of a value, broadcast over planes, ``level`` the size of a level of a channel.

    ``line``: how far a channel's line may lie from the processor's at its darkest and brightest, in levels.
    ``unit``: of a value, what the type it was kept in takes. ``rare``: the share of values that may be off by more than
    a level at all. ``has_floor``: values are cut off below, which may be at another place under another line.
    """

    most: Array
    level: Array
    line: float
    unit: float
    rare: float = 1.0
    has_floor: bool = False


@dataclass(frozen=True)
class Fit:
    """How a dump goes with a run. ``gain``, ``offset`` of each channel; ``error``: its rms in levels.

    ``exact``: it is the run but for rounding. ``affine``: it is, with another gain and offset.
    """

    exact: bool
    affine: bool
    gain: Array
    offset: Array
    error: float
    worst: float


def fit(dump: Array, run: Array, allowed: Allowed) -> Fit:
    """A dump's planes against a run's, [tile, channel, row, column]."""
    x, y = run.astype(np.float64), dump.astype(np.float64)
    beyond = np.abs(y - x) - allowed.unit * np.abs(x)
    gain, offset = line(x, y)
    level = allowed.level.reshape(-1, 1, 1)
    ends = np.stack([x.min((0, 2, 3)), x.max((0, 2, 3))])
    apart = np.abs((gain - 1) * ends + offset) / allowed.level
    is_on_line = bool((apart - allowed.unit * np.abs(ends) / allowed.level <= allowed.line).all())
    exact = is_on_line and _is_within(beyond, allowed, np.ones_like(gain))
    by_line = gain[:, None, None] * x + offset[:, None, None]
    left = np.abs(y - by_line) - allowed.unit * (np.abs(by_line) + np.abs(offset)[:, None, None])
    if allowed.has_floor:
        left = _past_floor(left, x, y, by_line)
    spread = x.std((0, 2, 3))
    affine = _is_within(left, allowed, np.abs(gain)) and bool((np.abs(gain) * spread > 0).all())
    affine = affine and not (allowed.has_floor and is_hidden(x, y))
    affine = affine and bool(np.sqrt(np.mean(np.maximum(left, 0) ** 2)) <= NEAR * y.std())
    rms = float(np.sqrt(np.mean(((y - x) / level) ** 2)))
    return Fit(exact, affine and not exact, gain, offset, rms, float((np.abs(y - x) / level).max()))


def above_floor(x: Array, y: Array) -> Array:
    """Where neither of two is at its lowest value."""
    return np.asarray((x > x.min() + 1e-6) & (y > y.min() + 1e-6))


def is_hidden(x: Array, y: Array) -> bool:
    """Whether most of what is above the lowest value of y is at that of x, which explains anything."""
    return bool(above_floor(x, y).sum() < HIDDEN * (y > y.min() + 1e-6).sum())


def _past_floor(left: Array, x: Array, y: Array, by_line: Array) -> Array:
    """What is left where values may have been cut off: at the lowest of y, all that would be lower; of x, any lower."""
    lowest = np.maximum(by_line, y.min())
    at_x = x <= x.min() + 1e-6
    return np.where(above_floor(x, y), left, np.where(at_x, np.maximum(y - lowest, 0), np.abs(y - lowest)))


def _is_within(left: Array, allowed: Allowed, gain: Array) -> bool:
    """Whether what is left is no more than rounding takes, where values are ``gain`` times as large."""
    size = gain[:, None, None]
    if not (left <= allowed.most * size).all():
        return False
    return bool((left > 1.001 * allowed.level[:, None, None] * size).mean() <= allowed.rare)


def line(x: Array, y: Array) -> tuple[Array, Array]:
    """The gain and the offset of each channel by least squares; values at the lowest of either tell nothing of it."""
    gains, offsets = list[float](), list[float]()
    for channel in range(x.shape[1]):
        a, b = x[:, channel].ravel(), y[:, channel].ravel()
        inside = above_floor(a, b)
        if inside.sum() >= ENOUGH:
            a, b = a[inside], b[inside]
        spread = a.var()
        gain = float(((a - a.mean()) * (b - b.mean())).mean() / spread) if spread > 1e-12 else 1.0
        gains.append(gain)
        offsets.append(float(b.mean() - gain * a.mean()))
    return np.array(gains), np.array(offsets)


def places(dump: Array, run: Array, allowed: Allowed, axes: Sequence[str]) -> str:
    """Where a dump is off: the tiles, channels, rows and columns, and how many of its values."""
    off = np.abs(dump - run) - allowed.unit * np.abs(run) > allowed.most
    said = []
    for axis, name in enumerate(axes):
        hit = np.flatnonzero(off.any(tuple(other for other in range(4) if other != axis)))
        if dump.shape[axis] > 1 and 0 < len(hit) < dump.shape[axis]:
            said.append(f"{name} {_ranges(hit.tolist())} of {dump.shape[axis]}")
    share = f"{100 * off.mean():.3g}% of the values"
    parts = [*_flat(dump, run, axes), *_most(dump, run, axes)] if len(said) < 2 else []
    return "; ".join([", ".join([share, *said]), *parts])


def _flat(dump: Array, run: Array, axes: Sequence[str]) -> Iterator[str]:
    """The planes, rows and columns of a dump that hold one value, and should not."""
    for axis, name in enumerate(axes):
        lines, right = (np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1) for x in (dump, run))
        flat = np.flatnonzero((np.ptp(lines, axis=1) == 0) & (np.ptp(right, axis=1) > 0))
        if len(flat) and dump.shape[axis] > 1:
            yield f"{name} {_ranges(flat.tolist())} of {dump.shape[axis]} hold one value"


def _most(dump: Array, run: Array, axes: Sequence[str]) -> Iterator[str]:
    """The neighbouring ones that hold most of what a dump is off by, where these are few."""
    squares = (dump.astype(np.float64) - run) ** 2
    for axis, name in enumerate(axes):
        each = squares.sum(tuple(other for other in range(4) if other != axis))
        if len(each) < 2 or each.sum() <= 0:
            continue
        total = np.concatenate([[0.0], np.cumsum(each)]) / each.sum()
        ends = np.searchsorted(total, total + MOST_OF)  # where it has as much, of each start
        size, start = min((int(end) - n, n) for n, end in enumerate(ends))
        if start + size <= len(each) and size <= max(1, len(each) // 3):
            yield f"{100 * MOST_OF:.0f}% of the error is in {name} {_ranges(range(start, start + size))}"


def _ranges(numbers: Sequence[int]) -> str:
    """0 to 3, 7 of [0, 1, 2, 3, 7]; with more than four gaps the first and the last alone."""
    runs = list[list[int]]()
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    if len(runs) > 4:
        return f"{len(numbers)} between {numbers[0]} and {numbers[-1]}"
    return ", ".join(f"{a} to {b}" if b > a else f"{a}" for a, b in runs)
