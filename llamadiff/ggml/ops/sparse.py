"""Ops of newer architectures: sparse attention's indexer, hyper-connections; windows over images and signals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llamadiff.ggml.op import Array, Op, op
from llamadiff.ggml.ops.views import kept_as

_LOWEST = float(np.finfo(np.float32).min)  # where a maximum starts: what is lower, -inf too, becomes this
_MAX = 0  # enum ggml_op_pool
_BILINEAR, _BICUBIC = 1, 2  # enum ggml_scale_mode
_ALIGN_CORNERS, _ANTIALIAS = 1 << 8, 1 << 9  # enum ggml_scale_flag


@op("LIGHTNING_INDEXER")
def lightning_indexer(n: Op) -> Array:
    """How much a query wants a key (DeepSeek-V3.2, equation 1; ggml_compute_forward_lightning_indexer).

    sum over heads of w relu(q k), plus mask: q [stream, token, head, S], k [stream, key, 1, S],
    w [stream, 1, token, head], mask [stream, 1, token, key] -> [stream, 1, token, key].
    """
    q, k, w, mask = (_wide(n.x(i)) for i in range(4))
    keys = k[..., 0, :].swapaxes(-1, -2)  # [stream, S, key]
    heads = (np.maximum(q[..., h, :] @ keys, 0) * w[..., 0, :, h, None] for h in range(q.shape[-2]))
    score = np.asarray(sum(heads))[..., None, :, :]
    return _narrow(score + np.take(mask, np.arange(score.shape[-4]) % mask.shape[-4], axis=-4))


@op("DSV4_HC_COMB")
def hyper_connection_mix(n: Op) -> Array:
    """How the residual streams mix (arXiv:2512.24880; ggml_compute_forward_dsv4_hc_comb): [1, token, from, to].

    Softmax over ``to``, then Sinkhorn's normalisation. The logits are the last of mixes [1, 1, token, (2 + hc) * hc],
    times scale[2], plus base. params: eps, number of iterations.
    """
    mixes, scale, base = (_wide(n.x(i)) for i in range(3))
    eps, streams = float(n.floats[0]), n.shape[-1]
    logits = (mixes * scale[..., 2:3] + base)[..., 0, :, 2 * streams :]  # [1, token, from * to]
    logits = logits.reshape(*logits.shape[:-1], streams, streams)
    mix = np.exp(logits - logits.max(axis=-1, keepdims=True))
    mix = mix / mix.sum(axis=-1, keepdims=True) + eps
    mix = mix / (mix.sum(axis=-2, keepdims=True) + eps)
    for _ in range(int(n.ints[1]) - 1):
        mix = mix / (mix.sum(axis=-1, keepdims=True) + eps)
        mix = mix / (mix.sum(axis=-2, keepdims=True) + eps)
    return _narrow(mix)


@op("DSV4_HC_PRE")
def hyper_connection_in(n: Op) -> Array:
    """Streams summed into one (arXiv:2512.24880; ggml_compute_forward_dsv4_hc_pre).

    x [1, token, stream, S] -> [1, 1, token, S], times weights [1, 1, token, stream] or, where params[1] is set, the
    sigmoid of gates like x; params[0] is a scale.
    """
    x, weights = _wide(n.x()), _wide(n.x(1))
    weights = 1 / (1 + np.exp(-weights)) if n.ints[1] else weights[..., 0, :, :, None]
    return _narrow(float(n.floats[0]) * (x * weights).sum(axis=-2)[..., None, :, :])


@op("DSV4_HC_POST")
def hyper_connection_out(n: Op) -> Array:
    """A block's result back to the streams (arXiv:2512.24880; ggml_compute_forward_dsv4_hc_post).

    x [1, 1, token, S] times post [1, 1, token, stream], plus the residual [1, token, stream, S] mixed by comb
    [1, token, from, to], or as it is without one.
    """
    x, residual, post, mix = _wide(n.x()), _wide(n.x(1)), _wide(n.x(2)), n.optional(3)
    kept = residual if mix is None else _wide(mix).swapaxes(-1, -2) @ residual
    return _narrow(x[..., 0, :, None, :] * post[..., 0, :, :, None] + kept)


@op("SOLVE_TRI")
def solve_triangular(n: Op) -> Array:
    """X of A X = B, A's lower triangle [.., row, row], B [.., row, column] (ggml_compute_forward_solve_tri)."""
    a, b = _wide(n.x()), _wide(n.x(1))
    x = np.zeros(np.broadcast_shapes(a[..., :1].shape, b.shape))
    for i in range(b.shape[-2]):
        known = a[..., i : i + 1, :i] @ x[..., :i, :]
        x[..., i : i + 1, :] = (b[..., i : i + 1, :] - known) / a[..., i : i + 1, i : i + 1]
    return _narrow(x)


@op("SET")
def set_region(n: Op) -> Array:
    """A copy of a with b written into it (ggml_compute_forward_set).

    params: strides of b's axes 1, 2 and 3 inside a, and where it starts, in bytes; values have four.
    """
    a, b = n.x(), n.x(1)
    lead = np.broadcast_shapes(a.shape[:-4], b.shape[:-4])
    steps = [*(int(stride) // 4 for stride in n.ints[2::-1]), 1]
    places = int(n.ints[3]) // 4 + sum(
        np.arange(size).reshape(-1, *[1] * (3 - axis)) * step
        for axis, (size, step) in enumerate(zip(b.shape[-4:], steps, strict=True))
    )
    out = np.array(np.broadcast_to(a, (*lead, *a.shape[-4:])), order="C").reshape(*lead, -1)
    out[..., np.ravel(places)] = b.reshape(*b.shape[:-4], -1)
    return out.reshape(*lead, *n.shape)


@op("IM2COL")
def im2col(n: Op) -> Array:
    """The values under each place of a kernel (ggml_compute_forward_im2col); zeros outside.

    Images [image, channel, y, x] (or signals [1, signal, channel, x]) -> [image, out y, out x, channel * ky * kx].
    params: stride x, y, padding x, y, dilation x, y, whether these are images.
    """
    kernel, x = n.x().shape, n.x(1)
    if not n.ints[6]:
        x, kernel = x[..., 0, :, :, None, :], (*kernel[:-2], 1, kernel[-1])
    height, width = (n.shape[-3], n.shape[-2]) if n.ints[6] else (1, n.shape[-2])
    found = _patches(x, (height, width), kernel[-2:], _ints(n, 6))  # [image, channel, out y, ky, out x, kx]
    columns = np.moveaxis(found, (-4, -2), (-5, -4))  # [image, out y, out x, channel, ky, kx]
    return kept_as(columns.reshape(*x.shape[:-4], *n.shape).astype(np.float32), n.kind)


@op("CONV_2D_DW")
def conv_2d_depthwise(n: Op) -> Array:
    """Every channel of [image, channel, y, x] with its own kernel [channel, 1, ky, kx].

    ggml_compute_forward_conv_2d_dw. params: stride x, y, padding x, y, dilation x, y.
    """
    kernel, x = _wide(n.x()), _wide(n.x(1))
    found = _patches(x, n.shape[-2:], kernel.shape[-2:], _ints(n, 6))
    return _narrow(np.einsum("...icykxl,...ckl->...icyx", found, kernel[..., 0, :, :]))


@op("POOL_1D")
def pool_1d(n: Op) -> Array:
    """The largest, or the mean of those there are, under each window (ggml_compute_forward_pool_1d).

    params: kind of pool, size, stride, padding.
    """
    kind, size, stride, padding = _ints(n, 4)
    places = _places(n.shape[-1], size, stride, padding)
    if kind == _MAX:
        return _narrow(_windows(_floored(n.x()), -1, places, _LOWEST).max(axis=-1))
    there = ((places >= 0) & (places < n.x().shape[-1])).sum(axis=-1)
    return _narrow(_windows(_wide(n.x()), -1, places, 0).sum(axis=-1) / np.maximum(there, 1))


@op("POOL_2D")
def pool_2d(n: Op) -> Array:
    """The largest, or the sum over the size, under each window (ggml_compute_forward_pool_2d).

    params: kind of pool, size x, y, stride x, y, padding x, y.
    """
    kind, *params = _ints(n, 7)
    sizes, rest = params[1::-1], [*params[2:], 1, 1]
    if kind == _MAX:
        return _narrow(_patches(_floored(n.x()), n.shape[-2:], sizes, rest, _LOWEST).max(axis=(-3, -1)))
    return _narrow(_patches(_wide(n.x()), n.shape[-2:], sizes, rest).sum(axis=(-3, -1)) / (sizes[0] * sizes[1]))


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


def _wide(x: Array) -> Array:
    return x.astype(np.float64)


def _narrow(x: Array) -> Array:
    return np.asarray(x, np.float32)


def _ints(n: Op, count: int) -> list[int]:
    return [int(value) for value in n.ints[:count]]


def _floored(x: Array) -> Array:
    return np.maximum(x, _LOWEST)


def _places(count: int, size: int, stride: int, padding: int, dilation: int = 1) -> Array:
    """Where the values under each of ``count`` windows are: [window, place]."""
    return (np.arange(count) * stride - padding)[:, None] + np.arange(size) * dilation


def _windows(x: Array, axis: int, places: Array, outside: float) -> Array:
    """An axis (counted from the end) as two, window and place in it; ``outside`` where the array has no such place."""
    inside = (places >= 0) & (places < x.shape[axis])
    found = np.take(x, np.where(inside, places, 0), axis=axis)
    return np.where(inside.reshape(*inside.shape, *[1] * (-1 - axis)), found, outside)


def _patches(
    x: Array, counts: Sequence[int], sizes: Sequence[int], params: Sequence[int], outside: float = 0.0
) -> Array:
    """[.., y, x] -> [.., window y, place y, window x, place x].

    ``counts`` and ``sizes`` are y's and x's; ``params`` are ggml's: stride x, y, padding x, y, dilation x, y.
    """
    of_y, of_x = (_places(counts[i], sizes[i], *params[1 - i :: 2]) for i in (0, 1))
    return _windows(_windows(x, -1, of_x, outside), -3, of_y, outside)


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
