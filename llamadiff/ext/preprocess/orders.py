"""Planes in another order: tiles, patches, channels, flipped or moved; found by their values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
RGB = "RGB"
FAR = 8  # pixels, or frames, by which planes may be moved
MOST_BLOCKS = 20_000


def other_orders(dump: Array, run: Array, kind: str, sizes: Sequence[int]) -> Iterator[tuple[str, str, Array, Array]]:
    """Ways in which a run's planes may lie in a dump: the step, what it says, both as far as they can be compared."""
    if kind == "picture":
        if run.shape[1] == 3:
            for order in list(permutations(range(3)))[1:]:
                yield "channels", f"channels are in the order {''.join(RGB[n] for n in order)}", dump, run[:, order]
        if len(run) > 1:
            yield "axes", "each tile is flipped from left to right", dump, run[..., ::-1]
            yield "axes", "each tile is flipped upside down", dump, run[..., ::-1, :]
    else:
        yield "axes", "the bands are in reverse", dump, run[..., ::-1, :]
    if len(run) > 1:
        yield from _of_tiles(dump, run)
    if kind == "picture":
        for size in sizes:
            yield from _of_patches(dump, run, size)
    yield from moved(dump, run, kind)


def _of_tiles(dump: Array, run: Array) -> Iterator[tuple[str, str, Array, Array]]:
    chosen = nearest(dump.reshape(len(dump), -1), run.reshape(len(run), -1))
    if chosen != list(range(len(run))):
        yield "tiles", tiles_said(chosen, len(run)), dump, run[chosen]


def tiles_said(chosen: Sequence[int], count: int) -> str:
    """The order of tiles, in words where there are some."""
    last = count - 1
    if list(chosen) == [*range(1, count), 0]:
        return "the first tile comes last (the processor's first is often the thumbnail)"
    if list(chosen) == [last, *range(last)]:
        return "the last tile comes first (the processor's last is often the thumbnail)"
    if list(chosen) == list(range(last, -1, -1)):
        return "the tiles are in reverse"
    for fixed, part in ((0, list(chosen[1:])), (last, list(chosen[:-1]))):
        base = 1 if fixed == 0 else 0
        for rows in range(2, len(part)):
            if len(part) % rows == 0 and chosen[fixed if fixed == 0 else -1] == fixed:
                turned = (np.arange(len(part)).reshape(-1, rows).T.ravel() + base).tolist()
                if part == turned:
                    return "the tiles are ordered column by column, not row by row"
    missing = [each for each in range(count) if each not in chosen]
    twice = f", and {', '.join(map(str, missing))} missing" if missing else ""
    return f"the tiles are the processor's {', '.join(map(str, chosen))}{twice}"


def nearest(dump: Array, run: Array) -> list[int]:
    """The row of a run that each row of a dump is nearest to, by up to so many values of it."""
    step = max(1, dump.shape[1] // 4096)
    a, b = dump[:, ::step].astype(np.float64), run[:, ::step].astype(np.float64)
    apart = (a**2).sum(1)[:, None] - 2 * a @ b.T + (b**2).sum(1)[None]
    return [int(each) for each in apart.argmin(1)]


def _of_patches(dump: Array, run: Array, size: int) -> Iterator[tuple[str, str, Array, Array]]:
    """Patches of a size that changed places, or each of which is turned."""
    if run.shape[-1] % size or run.shape[-2] % size or min(run.shape[-2:]) <= size:
        return
    ours, theirs = blocks(run, size), blocks(dump, size)
    if len(ours) > MOST_BLOCKS:
        return
    turned = unblocked(ours.swapaxes(-1, -2), run.shape)
    yield "patches", f"each patch of {size} has its rows and columns exchanged", dump, turned
    chosen = nearest(theirs.reshape(len(theirs), -1), ours.reshape(len(ours), -1))
    if chosen != list(range(len(chosen))) and len(set(chosen)) > len(chosen) // 2:
        rows, columns = run.shape[-2] // size, run.shape[-1] // size
        says = f"patches of {size} are in another order{_order_said(chosen, rows, columns)}"
        yield "patches", says, dump, unblocked(ours[chosen], run.shape)


def _order_said(chosen: Sequence[int], rows: int, columns: int) -> str:
    grid = np.arange(rows * columns)
    orders = {"column by column": grid.reshape(rows, columns).T.ravel(),
              "the rows of patches in reverse": grid.reshape(rows, columns)[::-1].ravel(),
              "each row of patches in reverse": grid.reshape(rows, columns)[:, ::-1].ravel()}  # fmt: skip
    for merge in (2, 4):
        if rows % merge == 0 and columns % merge == 0:
            inner = grid.reshape(rows // merge, merge, columns // merge, merge).transpose(0, 2, 1, 3).ravel()
            orders[f"in blocks of {merge} x {merge}"] = inner
            orders[f"row by row where blocks of {merge} x {merge} are expected"] = np.argsort(inner)
    for name, order in orders.items():
        if np.mean(np.asarray(chosen[: len(order)]) == order) > 0.9:
            return f": {name}"
    return ""


def blocks(planes: Array, size: int) -> Array:
    """[tile, channel, row, column] -> [tile * patch, channel, size, size]."""
    tiles, channels, height, width = planes.shape
    cut = planes.reshape(tiles, channels, height // size, size, width // size, size)
    return cut.transpose(0, 2, 4, 1, 3, 5).reshape(-1, channels, size, size)


def unblocked(cut: Array, shape: Sequence[int]) -> Array:
    """The reverse of it."""
    tiles, channels, height, width = shape
    size = cut.shape[-1]
    laid = cut.reshape(tiles, height // size, width // size, channels, size, size)
    return laid.transpose(0, 3, 1, 4, 2, 5).reshape(tiles, channels, height, width)


def moved(dump: Array, run: Array, kind: str) -> Iterator[tuple[str, str, Array, Array]]:
    """Planes moved by some pixels, or frames: where the middle agrees best, if that is not where it stands."""
    down = [0] if kind == "sound" else range(-FAR, FAR + 1)
    height, width = run.shape[-2:]
    if width <= 4 * FAR or (kind == "picture" and height <= 4 * FAR):
        return
    middle = (slice(None), slice(None), slice(None) if kind == "sound" else slice(FAR, height - FAR),
              slice(FAR, width - FAR))  # fmt: skip
    part = dump[middle]
    best, place = np.inf, (0, 0)
    for dy in down:
        for dx in range(-FAR, FAR + 1):
            other = run[..., (0 if kind == "sound" else FAR + dy) : (height if kind == "sound" else height - FAR + dy),
                        FAR + dx : width - FAR + dx]  # fmt: skip
            error = float(np.abs(part[..., ::3, ::3] - other[..., ::3, ::3]).mean())
            if error < best:
                best, place = error, (dy, dx)
    if place == (0, 0):
        return
    dy, dx = place
    other = run[..., (0 if kind == "sound" else FAR + dy) : (height if kind == "sound" else height - FAR + dy),
                FAR + dx : width - FAR + dx]  # fmt: skip
    words = []
    if kind == "sound":
        words = [f"the frames are {abs(dx)} {'early' if dx > 0 else 'late'}"]
    else:
        words += [f"{abs(dy)} {'up' if dy > 0 else 'down'}"] if dy else []
        words += [f"{abs(dx)} to the {'left' if dx > 0 else 'right'}"] if dx else []
        words = [f"the picture is moved by pixels: {' and '.join(words)}"]
    yield "place", words[0], part, other
