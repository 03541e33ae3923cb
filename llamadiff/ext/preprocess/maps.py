"""Where the pixels of a picture's tiles come from: which part of the source, at which scale, flipped or turned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.ext.preprocess.filters import resized, taps_at, weighted

Array = NDArray[Any]
SIDE = 26  # pixels of a tile's longer side, where it is searched for
SMALLEST = 8  # pixels of a side of a tile that is searched for
FINEST = 1.05  # between the scales that are tried
DEEPEST = 3.0  # times that a source is as wide as the part of it that is searched for
LIKE = 0.6  # how alike the two must be to be looked at closely
ROUNDS = 12
TURNS = ("as it is", "turned by 90 degrees", "turned by 180 degrees", "turned by 270 degrees",
         "flipped from left to right", "flipped and turned by 90 degrees", "flipped upside down",
         "rows and columns exchanged")  # fmt: skip


@dataclass(frozen=True)
class Map:
    """``turn``: how a tile is turned first (of TURNS). ``scale``, ``start``: of rows and columns, the source's pixels
    to one of the tile's, and the source's place of its first one's edge. ``like``: how alike they are, up to 1.

    ``inside``: the rows and the columns of the tile that are no border, as it lies.
    """

    turn: int
    scale: tuple[float, float]
    start: tuple[float, float]
    like: float
    inside: tuple[slice, slice]


@dataclass(frozen=True)
class Cut:
    """A source resized to ``size`` and cut at ``place``; or, with ``box`` (rows, columns), a part of it resized."""

    turn: int
    size: tuple[int, int]
    place: tuple[int, int]
    box: tuple[int, int, int, int] | None = None


def turned(tile: Array, turn: int) -> Array:
    """A tile [.., row, column] flipped, then turned."""
    tile = tile[..., ::-1] if turn >= 4 else tile
    return np.rot90(tile, turn % 4, (-2, -1))


def turned_back(tile: Array, turn: int) -> Array:
    """The reverse of it."""
    tile = np.rot90(tile, -(turn % 4), (-2, -1))
    return tile[..., ::-1] if turn >= 4 else tile


def inside_of(tile: Array) -> tuple[slice, slice]:
    """The rows and columns of a tile [channel, row, column] between borders of one value."""
    found = []
    for axis in (1, 2):
        lines = np.moveaxis(tile, axis, 0).reshape(tile.shape[axis], tile.shape[0], -1)
        flat = np.flatnonzero(np.ptp(lines, -1).max(1) > 0.01)
        found.append(slice(int(flat[0]), int(flat[-1]) + 1) if len(flat) else slice(0, 0))
    return found[0], found[1]


def map_of(tile: Array, source: Array, known: Sequence[Map] = ()) -> Map | None:
    """Where a tile [channel, row, column] of levels lies in a source; first at the scales of maps that are known."""
    inside = inside_of(tile)
    part = tile[:, inside[0], inside[1]].mean(0)
    if min(part.shape) < SMALLEST or min(source.shape[1:]) < SMALLEST:
        return None
    grey, best = source.mean(0), None
    for each in dict.fromkeys((known_map.turn, known_map.scale) for known_map in known):
        found = _coarse(part, grey, [each[0]], [each[1]])
        if found is not None and found.like > 0.9:
            best = _refined(replace(found, inside=inside), part, grey)
            if best.like > 0.98:
                return best
    found = _coarse(part, grey, range(8), None)
    if found is None or found.like < LIKE:
        return best
    return _refined(replace(found, inside=inside), part, grey)


def _scales(tile: int, source: int) -> list[float]:
    """Source's pixels to one of the tile's: from all of the source on."""
    most = source / tile
    return [most / FINEST**n for n in range(-1, int(np.log(DEEPEST) / np.log(FINEST)) + 1)]


def _coarse(part: Array, source: Array, turns: Sequence[int], scales: Sequence[tuple[float, float]] | None
            ) -> Map | None:  # fmt: skip
    best: Map | None = None
    for upright in ([turn for turn in turns if turn % 2 == 0], [turn for turn in turns if turn % 2]):
        if not upright:
            continue
        lies = turned(part, upright[0])
        less = max(1.0, max(lies.shape) / SIDE)
        size = [max(4, round(n / less)) for n in lies.shape]
        step = [lies.shape[n] / size[n] for n in (0, 1)]
        small = [_reduced(turned(part, turn), *size) for turn in upright]
        tries = scales or [(a, b) for a in _scales(lies.shape[0], source.shape[0])
                           for b in _scales(lies.shape[1], source.shape[1])]  # fmt: skip
        seen = set[tuple[int, int]]()
        for rows, columns in tries:
            to = (round(source.shape[0] / rows / step[0]), round(source.shape[1] / columns / step[1]))
            if to in seen or to[0] < size[0] - 1 or to[1] < size[1] - 1:
                continue
            seen.add(to)
            found = _place(_reduced(source, max(to[0], size[0]), max(to[1], size[1])), small)
            if best is None or found[0] > best.like:
                true = (source.shape[0] / max(to[0], size[0]), source.shape[1] / max(to[1], size[1]))
                best = Map(upright[found[1]], (true[0] / step[0], true[1] / step[1]),
                           (found[2] * true[0], found[3] * true[1]), found[0], (slice(0), slice(0)))  # fmt: skip
    return best


def _reduced(values: Array, rows: int, columns: int) -> Array:
    return np.asarray(resized(values[None], rows, columns, "bilinear", {"round": "not", "clip": False})[0])


def _place(source: Array, parts: Sequence[Array]) -> tuple[float, int, int, int]:
    """How alike the most alike place of a source is to one of some parts, which part, and its row and column."""
    rows, columns = parts[0].shape
    at = np.fft.rfft2(source)
    count, shape = rows * columns, source.shape
    window = np.zeros(shape)
    window[:rows, :columns] = 1
    by_window = np.conj(np.fft.rfft2(window))
    total = np.fft.irfft2(at * by_window, shape)
    squares = np.fft.irfft2(np.fft.rfft2(source**2) * by_window, shape)
    spread = np.sqrt(np.maximum(squares - total**2 / count, 1e-9 * count))
    whole = (slice(0, shape[0] - rows + 1), slice(0, shape[1] - columns + 1))
    best = (-1.0, 0, 0, 0)
    for number, part in enumerate(parts):
        centred = part - part.mean()
        window[:rows, :columns] = centred
        like = np.fft.irfft2(at * np.conj(np.fft.rfft2(window)), shape) / spread / max(np.linalg.norm(centred), 1e-9)
        like = like[whole]
        place = np.unravel_index(int(like.argmax()), like.shape)
        best = max(best, (float(like[place]), number, int(place[0]), int(place[1])))
    return best


def _refined(found: Map, part: Array, source: Array) -> Map:
    """Scales and places at which a part is most alike, by Gauss and Newton."""
    lies = turned(part, found.turn)
    numbers = np.array([found.scale[0], found.start[0], found.scale[1], found.start[1]])
    value, like = _seen(source, numbers, lies.shape), found.like
    error, steps = _away(value, lies), np.array([1e-3 * numbers[0], 0.05, 1e-3 * numbers[2], 0.05])
    for _ in range(ROUNDS):
        slopes = [(_seen(source, numbers + step, lies.shape) - value).ravel() / step.sum() for step in np.diag(steps)]
        table = np.stack([*slopes, value.ravel(), np.ones(value.size)], 1)
        by = np.linalg.lstsq(table.T @ table + 1e-9 * np.eye(6), table.T @ lies.ravel(), rcond=None)[0]
        if abs(by[4]) < 1e-6:
            break
        moved = by[:4] / by[4]
        nearer = False
        for share in (1.0, 0.5, 0.25, 0.1):
            tried = numbers + share * moved
            if (tried[[0, 2]] <= 0).any():
                continue
            seen = _seen(source, tried, lies.shape)
            if (away := _away(seen, lies)) < error * 0.9999:
                numbers, value, error, nearer = tried, seen, away, True
                break
        if not nearer:
            break
    like = max(like, 1 - error**2 / 2)
    return replace(found, scale=(float(numbers[0]), float(numbers[2])), start=(float(numbers[1]), float(numbers[3])),
                   like=like)  # fmt: skip


def _seen(source: Array, numbers: Array, shape: tuple[int, ...]) -> Array:
    """What a source shows at scales and places."""
    found = source
    for axis in (1, 0):
        scale, start = numbers[2 * axis], numbers[2 * axis + 1]
        centre = start + (np.arange(shape[axis]) + 0.5) * scale - 0.5
        ways = {"antialias": False, "a": -0.5, "wider": max(scale, 1.0)}
        found = weighted(found if axis else found.T, taps_at(centre, source.shape[axis], "bicubic", ways))
        found = found if axis else found.T
    return found


def _away(a: Array, b: Array) -> float:
    """How far two are apart, of 0 to 2, whatever their gain and offset are."""
    x, y = a - a.mean(), b - b.mean()
    size = np.linalg.norm(x) * np.linalg.norm(y)
    return float(np.sqrt(max(0.0, 2 - 2 * (x * y).sum() / size))) if size > 1e-9 else 2.0


def cuts_of(found: Map, shape: Sequence[int], source: Sequence[int]) -> Iterator[Cut]:
    """Whole numbers that a map may have come from: ``shape`` of the part as it is turned, and the source's size."""
    sizes, boxes = list[list[tuple[int, int]]](), list[list[tuple[int, int]]]()
    for axis in (0, 1):
        scale, start, count = found.scale[axis], found.start[axis], shape[axis]
        whole = source[axis] / scale
        reach = max(1, round(0.004 * whole))
        near = sorted(range(round(whole) - reach, round(whole) + reach + 1), key=lambda n: abs(n - whole))
        middle = (start + scale * count / 2) / source[axis]  # the part's middle, of the whole
        sizes.append([(n, round(middle * n - count / 2)) for n in near[:4] if n > 0])
        ends = [(round(start) + a, round(start + scale * count) + b) for a in (0, -1, 1) for b in (0, -1, 1)]
        boxes.append([(a, b) for a, b in ends if 0 <= a < b <= source[axis]])
    for rows in sizes[0]:
        for columns in sizes[1]:
            yield Cut(found.turn, (rows[0], columns[0]), (rows[1], columns[1]))
    for top, bottom in boxes[0][:4]:
        for left, right in boxes[1][:4]:
            yield Cut(found.turn, (shape[0], shape[1]), (0, 0), (top, bottom, left, right))


def made(cut: Cut, source: Array, shape: Sequence[int], kernel: str, how: dict[str, Any]) -> Array | None:
    """What a cut gives of a source [channel, row, column]: as it lies in the tile; None where it reaches beyond."""
    if cut.box is not None:
        top, bottom, left, right = cut.box
        return turned_back(resized(source[:, top:bottom, left:right], *cut.size, kernel, how), cut.turn)
    (rows, columns), (top, left) = cut.size, cut.place
    if top < 0 or left < 0 or top + shape[0] > rows or left + shape[1] > columns:
        return None
    whole = resized(source, rows, columns, kernel, how)
    return turned_back(whole[:, top : top + shape[0], left : left + shape[1]], cut.turn)
