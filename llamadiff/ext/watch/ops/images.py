"""What models of images, sound and diffusion have besides convolutions: pooling, resizing, windows, positions."""

from __future__ import annotations

from typing import Any

import numpy as np

from llamadiff.ext.graph.op import Array, Kernels, Op, op
from llamadiff.ext.watch.ops.convolutions import Windows

_LOWEST = float(np.finfo(np.float32).min)  # where a maximum starts: what is lower, -inf too, becomes this
_MAX = 0  # enum ggml_op_pool
_BILINEAR, _BICUBIC = 1, 2  # enum ggml_scale_mode
_ALIGN_CORNERS, _ANTIALIAS = 1 << 8, 1 << 9  # enum ggml_scale_flag


def _wide(x: Array) -> Array:
    return x.astype(np.float64)


def _narrow(x: Array) -> Array:
    return np.asarray(x, np.float32)


def _ints(n: Op, count: int) -> list[int]:
    return [int(value) for value in n.ints[:count]]


@op("POOL_1D")
def pool_1d(n: Op) -> Array:
    """The largest, or the mean of those there are, under each window (ggml_compute_forward_pool_1d).

    params: kind of pool, size, stride, padding.
    """
    kind, size, stride, padding = _ints(n, 4)
    windows = Windows(n.shape[-1:], [size], [stride], [padding], [1])
    if kind == _MAX:
        return _largest(n.x(), windows)
    there = _summed(np.ones(n.x().shape[-1]), windows)
    return _narrow(_summed(_wide(n.x()), windows) / np.maximum(there, 1))


@op("POOL_2D")
def pool_2d(n: Op) -> Array:
    """The largest, or the sum over the size, under each window (ggml_compute_forward_pool_2d).

    params: kind of pool, size x, y, stride x, y, padding x, y.
    """
    kind, *params = _ints(n, 7)
    sizes, strides, paddings = (params[at : at + 2][::-1] for at in (0, 2, 4))
    windows = Windows(n.shape[-2:], sizes, strides, paddings, [1, 1])
    if kind == _MAX:
        return _largest(n.x(), windows)
    return _narrow(_summed(_wide(n.x()), windows) / (sizes[0] * sizes[1]))


def _largest(x: Array, windows: Windows) -> Array:
    parts = (values for _, values in windows.under(np.maximum(x, _LOWEST), _LOWEST))
    return _narrow(np.maximum.reduce(list(parts)))


def _summed(x: Array, windows: Windows) -> Array:
    return np.asarray(sum(values for _, values in windows.under(x)))


@op("UPSCALE")
def upscale(n: Op) -> Array:
    """Resized to the result's shape (ggml_compute_forward_upscale); along the two outer axes to the nearest.

    params[0]: nearest, bilinear or bicubic, with flags to align corners and to smooth what shrinks.
    """
    x, mode = _wide(n.x()), int(n.ints[0])
    for axis in (-4, -3):
        x = np.take(x, _nearest(n.shape[axis], _ratio(n.shape[axis], x.shape[axis])), axis=axis)
    rows, columns = (_weights(n.shape[axis], x.shape[axis], mode) for axis in (-2, -1))
    return _narrow(rows @ x @ columns.T)


@op("WIN_PART")
def windows_of(n: Op) -> Array:
    """An image [1, y, x, S] in windows [window, y, x, S], zeros at the far edges (ggml_compute_forward_win_part).

    params: windows along x, along y, size of a window.
    """
    x = n.x()
    across, down, size = _ints(n, 3)
    edges = [(0, down * size - x.shape[-3]), (0, across * size - x.shape[-2]), (0, 0)]
    padded = np.pad(x, [*[(0, 0)] * (x.ndim - 3), *edges])
    tiles = padded.reshape(*x.shape[:-4], down, size, across, size, x.shape[-1]).swapaxes(-4, -3)
    return tiles.reshape(*x.shape[:-4], *n.shape)


@op("WIN_UNPART")
def windows_joined(n: Op) -> Array:
    """Windows [window, y, x, S] joined to an image [1, y, x, S] (ggml_compute_forward_win_unpart); params[0]: size."""
    x, size = n.x(), int(n.ints[0])
    across = -(-n.shape[-2] // size)
    tiles = x.reshape(*x.shape[:-4], -1, across, size, size, x.shape[-1]).swapaxes(-4, -3)
    image = tiles.reshape(*x.shape[:-4], 1, tiles.shape[-5] * size, across * size, x.shape[-1])
    return image[..., : n.shape[-3], : n.shape[-2], :]


@op("GET_REL_POS")
def relative_positions(n: Op) -> Array:
    """Rows of [1, 1, 2 * size - 1, S] by how far a key is behind a query -> [1, query, key, S].

    ggml_compute_forward_get_rel_pos (arXiv:2304.02643).
    """
    keys = n.shape[-2]
    rows = np.arange(n.shape[-3])[:, None] + (keys - 1 - np.arange(keys))
    return np.asarray(n.x()[..., 0, 0, :, :][..., None, rows, :])


@op("ADD_REL_POS")
def add_relative_positions(n: Op) -> Array:
    """Scores [1, window, query, y * x] plus what each query wants of columns [window, .., .., x], and of rows alike.

    ggml_compute_forward_add_rel_pos (arXiv:2304.02643).
    """
    x, columns, rows = n.alike(0, 1, 2)
    both = _wide(rows)[..., :, None] + _wide(columns)[..., None, :]  # [.., y, x]
    return _narrow(_wide(x) + both.reshape(x.shape))


def _unfollowed(n: Op) -> float:
    """A frequency may be off by its last digit, and with it the angle."""
    return float(np.square(_angles(n) * 2.0**-23).mean())


@op("TIMESTEP_EMBEDDING", rounds=Kernels(unfollowed=_unfollowed))
def timestep_embedding(n: Op) -> Array:
    """Cosines, then sines, of steps [1, 1, 1, step] at falling frequencies -> [1, 1, step, size]; an odd end is zero.

    ggml_compute_forward_timestep_embedding (arXiv:1706.03762), which computes angles in float32. params: size, the
    longest period.
    """
    angles = _wide(_angles(n))
    odd = np.zeros((*angles.shape[:-1], n.shape[-1] % 2))
    return _narrow(np.concatenate([np.cos(angles), np.sin(angles), odd], axis=-1))


def _angles(n: Op) -> Array:
    """[.., step, frequency]."""
    real: type[Any] = np.float64 if n.exact else np.float32
    size, period = _ints(n, 2)
    falling: Array = -real(np.log(period)) * np.arange(size // 2).astype(real) / real(size // 2)
    frequencies = np.exp(_wide(falling)).astype(real)
    return np.asarray(n.x().swapaxes(-1, -2).astype(real) * frequencies)


def _ratio(wide: int, narrow: int) -> np.float32:
    return np.float32(wide) / np.float32(narrow)


def _nearest(count: int, ratio: np.float32) -> Array:
    return (np.arange(count, dtype=np.float32) / ratio).astype(np.int64)


def _weights(count: int, size: int, mode: int) -> Array:
    """What each of ``count`` new places takes from each of ``size`` old ones; places are in float32, as in ggml."""
    aligned = bool(mode & _ALIGN_CORNERS)
    ratio = _ratio(count - 1, size - 1) if aligned and count > 1 and size > 1 else _ratio(count, size)
    offset = np.float32(0.0 if aligned else 0.5)
    at = (np.arange(count, dtype=np.float32) + offset) / ratio
    kind = mode & 0xFF
    if kind == _BILINEAR:
        return _smoothed(at, offset, ratio, size) if mode & _ANTIALIAS else _linear(at - offset, size)
    if kind == _BICUBIC:
        return _cubic(at - offset, size)
    return np.eye(size)[_nearest(count, ratio)]


def _linear(at: Array, size: int) -> Array:
    """Bilinear: between the two neighbours."""
    low = np.floor(at).astype(np.int64)
    low, high = np.clip(low, 0, size - 1), np.clip(low + 1, 0, size - 1)
    share = np.clip(at - low, 0, 1)[:, None]
    return np.asarray(np.eye(size)[low] * (1 - share) + np.eye(size)[high] * share)


def _smoothed(at: Array, offset: np.float32, ratio: np.float32, size: int) -> Array:
    """Bilinear with antialiasing: a triangle as wide as what becomes one new place."""
    support = max(np.float32(1), 1 / ratio)
    old, at = np.arange(size), at[:, None]
    first = np.maximum((at - support + offset).astype(np.int64), 0)
    last = np.minimum((at + support + offset).astype(np.int64), size)
    weights = np.maximum(1 - np.abs((old - at + offset) / support), 0) * ((old >= first) & (old < last))
    return np.asarray(weights / np.maximum(weights.sum(axis=1, keepdims=True), np.finfo(np.float32).tiny), np.float64)


def _cubic(at: Array, size: int) -> Array:
    """Bicubic convolution with a = -0.75 (Keys 1981): from the four neighbours, the edge's again beyond it."""
    low = np.floor(at).astype(np.int64)
    weights = np.zeros((len(at), size))
    for tap in (-1, 0, 1, 2):
        far = np.abs(at - low - tap).astype(np.float64)
        near = (1.25 * far - 2.25) * far**2 + 1
        outer = -0.75 * (far**3 - 5 * far**2 + 8 * far - 4)
        share = np.where(far <= 1, near, outer)[:, None]
        weights += np.eye(size)[np.clip(low + tap, 0, size - 1)] * share
    return weights
