"""What an encoder is given, as planes [tile, channel, row, column]; and the ways in which a dump may hold them.

A picture's tiles have rows and columns of pixels; a sound's chunks have bands and frames. Patches are put together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.ext.preprocess.processor import Features

Array = NDArray[Any]
AXES = "TCHW"
SIZES = (14, 16, 28, 32, 8, 12, 30, 48, 4, 2)  # of patches


@dataclass(frozen=True)
class Patches:
    """How planes are cut: patches of ``size`` squared, ``merge`` squared of them beside each other, ``times`` alike.

    ``inner``: the order within one, ``chw``, ``hwc`` or ``tchw``.
    """

    size: int
    merge: int = 1
    times: int = 1
    inner: str = "chw"


@dataclass(frozen=True)
class Planes:
    """``values`` [tile, channel, row, column], and how the processor cuts them into patches, if it does."""

    values: Array
    patches: Patches | None = None


@dataclass(frozen=True)
class Reading:
    """A dump as planes; ``wrong`` says what is wrong with the order that it is read in, if it is."""

    says: str
    values: Array
    wrong: str | None = None


def planes_of(features: Features, kind: str) -> Planes:
    """What a processor gave, put together."""
    values, more = features.values, features.more
    if kind == "sound":
        while values.ndim > 3 and values.shape[0] == 1:
            values = values[0]
        return Planes(values.reshape(-1, 1, *values.shape[-2:]) if values.ndim > 1 else values.reshape(1, 1, 1, -1))
    kept: Mapping[str, int] = more.get("kept", {})
    size, merge, times = (kept.get(f"{name}_size", 1) for name in ("patch", "merge", "temporal_patch"))
    if "image_grid_thw" in more and values.ndim == 2:
        _, rows, columns = more["image_grid_thw"][0]
        patches = Patches(size, merge, times)
        if values.shape[1] == 3 * times * size * size:
            return Planes(joined(values, patches, 3, rows, columns)[None], patches)
    if "spatial_shapes" in more and values.ndim == 3 and values.shape[-1] == 3 * size * size:
        rows, columns = more["spatial_shapes"][0]
        patches = Patches(size, inner="hwc")
        return Planes(joined(values[0, : rows * columns], patches, 3, rows, columns)[None], patches)
    if values.ndim >= 3:
        return Planes(values.reshape(-1, *values.shape[-3:]))
    return Planes(values.reshape(1, 1, *values.shape[-2:]))


def joined(values: Array, patches: Patches, channels: int, rows: int, columns: int) -> Array:
    """Patches [rows * columns, values] put together: [channel, row, column]."""
    p, m, t = patches.size, patches.merge, patches.times
    outer = values.reshape(rows // m, columns // m, m, m, -1)
    outer = outer.transpose(0, 2, 1, 3, 4).reshape(rows, columns, -1)  # row by row
    if patches.inner == "hwc":
        return outer.reshape(rows, columns, p, p, channels).transpose(4, 0, 2, 1, 3).reshape(channels, rows * p, -1)
    shape = (channels, t) if patches.inner == "chw" else (t, channels)
    inner = outer.reshape(rows, columns, *shape, p, p).take(0, axis=2 if patches.inner == "tchw" else 3)
    return np.asarray(inner.transpose(2, 0, 3, 1, 4).reshape(channels, rows * p, -1))


def _is_repeated(flat: Array, times: int, inner: str) -> bool:
    """Whether the frames of patches [..., values] are alike, as those of a still picture are."""
    frames = flat.reshape(len(flat), flat.shape[1], times, -1) if inner == "tchw" else (
        flat.reshape(*flat.shape[:2], 3, times, -1).swapaxes(2, 3)
    )  # fmt: skip
    return bool(np.array_equal(frames, np.broadcast_to(frames[:, :, :1], frames.shape)))


def readings(dump: Array, planes: Planes, kind: str) -> Iterator[Reading]:
    """Every way in which a dump may hold planes of these sizes; the right ones first."""
    sizes = planes.values.shape
    shape = tuple(n for n in dump.shape if n > 1)
    names = [axis for axis, n in zip(AXES, sizes, strict=True) if n > 1]
    fits = [order for order in permutations(names) if shape == tuple(sizes[AXES.index(axis)] for axis in order)]
    is_cut = planes.patches is not None or not fits
    if not fits and dump.size == prod(sizes) and not _is_cut(shape, sizes):
        fits = list(permutations(names))  # its shape says nothing
    found = [_transposed(dump, order, sizes, kind) for order in fits]
    if fits:  # values that lie in another order than their shape says
        usual = ("TCHW", "THWC") if kind == "picture" else ("TCHW", "TCWH")
        orders = dict.fromkeys(tuple(axis for axis in order if axis in names) for order in usual)
        for read in [_transposed(dump, order, sizes, kind) for order in orders if order not in fits]:
            wrong = f"values lie as {read.says} in memory, under a shape of {found[0].says}"
            found.append(Reading(read.says, read.values, wrong))
    found += list(_from_patches(dump, shape, planes)) if kind == "picture" and is_cut else []
    yield from sorted(found, key=lambda each: each.wrong is not None)


def _is_cut(shape: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether a dump's shape is that of patches, and not of planes that lie flat."""
    return len(shape) >= 2 and shape[-1] not in sizes and shape[-1] != sizes[-1] * sizes[-2]


def _transposed(dump: Array, order: Sequence[str], sizes: Sequence[int], kind: str) -> Reading:
    values = dump.reshape([sizes[AXES.index(axis)] for axis in order])
    back = [order.index(axis) for axis in AXES if axis in order]
    says = "".join(order)
    is_turned = "H" in order and "W" in order and order.index("H") > order.index("W")
    wrong = "rows and columns are exchanged" if is_turned and kind == "picture" else None
    if "T" in order and order.index("T") and order[:2] != ("C", "T") and kind == "picture":
        wrong = f"the tiles are not the outer axis but {says}"
    if kind == "sound":
        says = says.replace("H", "band ").replace("W", "frame ").replace("T", "chunk ").replace("C", "").strip()
    return Reading(says, values.transpose(back).reshape(sizes), wrong)


def _from_patches(dump: Array, shape: Sequence[int], planes: Planes) -> Iterator[Reading]:
    """A dump [patch, values], or [tile, patch, values], or with the patch's own axes apart."""
    tiles, channels, height, width = planes.values.shape
    own = planes.patches
    for size in dict.fromkeys([own.size] if own else SIZES):
        rows, columns = height // size, width // size
        for times in dict.fromkeys([own.times if own else 1, 1]):
            each = channels * size * size * times
            if rows * size != height or columns * size != width or dump.size != tiles * rows * columns * each:
                continue
            if len(shape) < 2 and own is None:
                continue  # a flat one is planes
            flat = dump.reshape(tiles, rows * columns, each)
            usual = own.merge if own else 1
            for merge in dict.fromkeys([usual, 1, 2, 4]):
                if rows % merge or columns % merge:
                    continue
                for inner in ("chw", "hwc") if times == 1 else ("chw", "tchw"):
                    how = Patches(size, merge, times, inner)
                    values = np.stack([joined(tile, how, channels, rows, columns) for tile in flat])
                    wrong = None if merge == usual else f"patches are ordered {_order(merge)}, not {_order(usual)}"
                    if times > 1 and not _is_repeated(flat, times, inner):
                        wrong = f"the {times} frames of a patch differ, which a still picture repeats"
                    elif inner == "tchw":
                        wrong = "frames stand before channels in a patch, not channels before frames"
                    yield Reading(f"patches of {size}, {inner.upper()}", values, wrong)
            turned = flat.reshape(tiles, columns, rows, each).swapaxes(1, 2).reshape(flat.shape)
            for inner in ("chw", "hwc") if times == 1 else ("chw",):
                how = Patches(size, 1, times, inner)
                values = np.stack([joined(tile, how, channels, rows, columns) for tile in turned])
                if times > 1 and not _is_repeated(flat, times, inner):
                    continue
                yield Reading(f"patches of {size}, {inner.upper()}", values,
                              f"patches are ordered column by column, not {_order(usual)}")  # fmt: skip


def _order(merge: int) -> str:
    return "row by row" if merge == 1 else f"in blocks of {merge} x {merge}"
