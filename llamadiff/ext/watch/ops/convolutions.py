"""Convolutions and their inverse, over signals, images and volumes; and what they are made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llamadiff.ext.graph.op import Array, Op, op
from llamadiff.ext.graph.stored import kept_as


@dataclass(frozen=True)
class Windows:
    """Where a kernel lies on an array's innermost axes, in each window; each axis' figures, the outermost first."""

    counts: Sequence[int]
    sizes: Sequence[int]
    strides: Sequence[int]
    paddings: Sequence[int]
    dilations: Sequence[int]

    @classmethod
    def of(cls, n: Op, counts: Sequence[int], sizes: Sequence[int]) -> Windows:
        """As op_params say: strides, paddings, dilations, each from the innermost axis on."""
        axes = len(counts)
        strides, paddings, dilations = n.ints[: 3 * axes].reshape(3, axes)[:, ::-1].tolist()
        return cls(counts, sizes, strides, paddings, dilations)

    def under(self, x: Array, outside: float = 0.0) -> Iterator[tuple[tuple[int, ...], Array]]:
        """Each place of the kernel, and the values under it in all windows; ``outside`` where the array has none."""
        x = self._padded(x, outside)
        for place in np.ndindex(*self.sizes):
            yield place, x[self.at(place)]

    def at(self, place: tuple[int, ...]) -> tuple[Any, ...]:
        """The index of what is under a place of the kernel, in an array that is padded already."""
        steps = zip(place, self.dilations, self.strides, self.counts, strict=True)
        return (..., *(slice(k * dilation, k * dilation + (count - 1) * stride + 1, stride)
                       for k, dilation, stride, count in steps))  # fmt: skip

    def _padded(self, x: Array, outside: float) -> Array:
        axes = zip(self.counts, self.sizes, self.strides, self.paddings, self.dilations, strict=True)
        reach = [(count - 1) * stride + (size - 1) * dilation + 1 - padding
                 for count, size, stride, padding, dilation in axes]  # fmt: skip
        sizes = x.shape[-len(reach) :]
        behind = [max(0, last - size) for last, size in zip(reach, sizes, strict=True)]
        edges = [(0, 0)] * (x.ndim - len(reach)) + list(zip(self.paddings, behind, strict=True))
        return np.pad(x, edges, constant_values=outside) if any(map(any, edges)) else x


def _columns(n: Op, x: Array, windows: Windows) -> Array:
    """The values under a kernel [.., image, channel, *axes] -> [.., image, *windows, channel * *places]."""
    axes = len(windows.counts)
    lead, channels = x.shape[: -axes - 1], x.shape[-axes - 1]
    columns = np.empty((*lead, *windows.counts, channels, *windows.sizes), np.float32)
    for place, values in windows.under(x):
        index: tuple[Any, ...] = (..., *place)
        columns[index] = np.moveaxis(values, -axes - 1, -1)
    return kept_as(columns.reshape(*_lead(x, axes), *n.shape), n.kind)


def _lead(x: Array, axes: int) -> tuple[int, ...]:
    """The batch axes of an array [.., image, channel, *axes]."""
    return x.shape[: -axes - 2]


@op("IM2COL")
def im2col(n: Op) -> Array:
    """The values under each place of a kernel (ggml_compute_forward_im2col); zeros outside.

    Images [image, channel, y, x] (or signals [1, signal, channel, x]) -> [image, out y, out x, channel * ky * kx].
    params: stride x, y, padding x, y, dilation x, y, whether these are images.
    """
    kernel, x = n.x().shape, n.x(1)
    if n.ints[6]:
        return _columns(n, x, Windows.of(n, n.shape[-3:-1], kernel[-2:]))
    of_x = ([int(value)] for value in n.ints[:6:2])
    return _columns(n, x[..., 0, :, :, :], Windows(n.shape[-2:-1], kernel[-1:], *of_x))


@op("IM2COL_3D")
def im2col_3d(n: Op) -> Array:
    """The same of volumes [volume * channel, z, y, x] -> [volume * out z, out y, out x, channel * kz * ky * kx].

    ggml_compute_forward_im2col_3d. params: stride x, y, z, padding x, y, z, dilation x, y, z, channels.
    """
    x = _of_channels(n.x(1), int(n.ints[9]))
    counts = (n.shape[-4] // x.shape[-5], *n.shape[-3:-1])
    return _columns(n, x, Windows.of(n, counts, n.x().shape[-3:]))


def _of_channels(x: Array, channels: int) -> Array:
    """[.., volume * channel, z, y, x] -> [.., volume, channel, z, y, x]."""
    return x.reshape(*x.shape[:-4], -1, channels, *x.shape[-3:])


@op("CONV_2D", rounds=True)
def conv_2d(n: Op) -> Array:
    """Images [image, channel, y, x] by kernels [out, channel, ky, kx] -> [image, out, out y, out x].

    ggml_compute_forward_conv_2d: what lies under a kernel is rounded to its type. params: stride x, y, padding x, y,
    dilation x, y.
    """
    kernel = n.x()
    return _convolved(n, kernel, n.x(1), Windows.of(n, n.shape[-2:], kernel.shape[-2:]))


@op("CONV_3D", rounds=True)
def conv_3d(n: Op) -> Array:
    """Volumes [volume * channel, z, y, x] by kernels [out * channel, kz, ky, kx] -> [volume * out, z, y, x].

    ggml_compute_forward_conv_3d. params: stride x, y, z, padding x, y, z, dilation x, y, z, channels, volumes, outs.
    """
    kernel, x = (_of_channels(part, int(n.ints[9])) for part in (n.x(), n.x(1)))
    return _convolved(n, kernel, x, Windows.of(n, n.shape[-3:], kernel.shape[-3:]))


def _convolved(n: Op, kernel: Array, x: Array, windows: Windows) -> Array:
    """[.., out, channel, *places] and [.., image, channel, *axes]: one product for each place of the kernel."""
    x, *_ = n.rounded(x, n.source_kind())
    out: Array = np.zeros(1, np.float32)
    for place, values in windows.under(x):
        out = out + _product(_of_place(kernel, place), values, len(place))
    return out.reshape(*out.shape[: -len(windows.counts) - 2], *n.shape)


def _of_place(kernel: Array, place: tuple[int, ...]) -> Array:
    index: tuple[Any, ...] = (..., *place)
    return np.asarray(kernel[index])


def _product(kernel: Array, values: Array, axes: int) -> Array:
    """Of one place [.., out, channel], and what lies under it [.., image, channel, *windows]."""
    flat = values.reshape(*values.shape[:-axes], -1)
    y: Array = np.matmul(kernel[..., None, :, :].astype(np.float32, copy=False), flat.astype(np.float32, copy=False))
    return y.reshape(*y.shape[:-1], *values.shape[-axes:])


@op("CONV_2D_DW")
def conv_2d_depthwise(n: Op) -> Array:
    """Every channel of [image, channel, y, x] with its own kernel [channel, 1, ky, kx].

    ggml_compute_forward_conv_2d_dw. params: stride x, y, padding x, y, dilation x, y.
    """
    kernel = n.x().astype(np.float64)[..., 0, :, :]  # [.., channel, ky, kx]
    windows = Windows.of(n, n.shape[-2:], kernel.shape[-2:])
    parts = (_of_place(kernel, place)[..., None, :, None, None] * x for place, x in windows.under(n.x(1)))
    return np.asarray(sum(parts), np.float32)


@op("CONV_TRANSPOSE_1D", rounds=True)
def conv_transpose_1d(n: Op) -> Array:
    """Each value of a signal [1, 1, channel, x] adds a kernel [1, channel, out, kx] -> [1, 1, out, out x].

    ggml_compute_forward_conv_transpose_1d: signals are rounded to the kernel's type. params[0]: stride.
    """
    return _spread(n, n.x()[..., 0, :, :, :], n.x(1)[..., 0, :, :, :], 1)


@op("CONV_TRANSPOSE_2D", rounds=True)
def conv_transpose_2d(n: Op) -> Array:
    """The same of images [image, channel, y, x] by kernels [channel, out, ky, kx] -> [image, out, out y, out x].

    ggml_compute_forward_conv_transpose_2d. params[0]: stride.
    """
    return _spread(n, n.x(), n.x(1), 2)


def _spread(n: Op, kernel: Array, x: Array, axes: int) -> Array:
    """[.., channel, out, *places] and [.., image, channel, *axes]: a product for each place, added where it lies."""
    x, *_ = n.rounded(x, n.source_kind())
    sizes, stride = kernel.shape[-axes:], int(n.ints[0])
    windows = Windows(x.shape[-axes:], sizes, [stride] * axes, [0] * axes, [1] * axes)
    lead = np.broadcast_shapes(kernel.shape[: -axes - 2], _lead(x, axes))
    out = np.zeros((*lead, *n.shape), np.float32).reshape(*lead, x.shape[-axes - 2], -1, *n.shape[-axes:])
    for place in np.ndindex(*sizes):
        out[windows.at(place)] += _product(_of_place(kernel, place).swapaxes(-1, -2), x, axes)
    return out.reshape(*lead, *n.shape)


@op("COL2IM_1D")
def col2im_1d(n: Op) -> Array:
    """Columns [1, 1, x, out * kx] added where they lie in a signal -> [1, 1, out, out x].

    ggml_compute_forward_col2im_1d. params: stride, outs, what is cut off at either end.
    """
    stride, outs, cut = (int(value) for value in n.ints[:3])
    x = n.x().astype(np.float64)
    x = x.reshape(*x.shape[:-1], outs, -1)  # [.., x, out, kx]
    windows = Windows(x.shape[-3:-2], x.shape[-1:], [stride], [0], [1])
    out = np.zeros((*x.shape[:-3], outs, n.shape[-1] + 2 * cut))
    for (k,) in np.ndindex(x.shape[-1]):
        out[windows.at((k,))] += x[..., k].swapaxes(-1, -2)
    return kept_as(out[..., cut : cut + n.shape[-1]].astype(np.float32), n.kind)
