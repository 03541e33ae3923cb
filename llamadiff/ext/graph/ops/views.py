"""Ops that move values: copies, reshapes, permutations, concatenation, rows in and out."""

from __future__ import annotations

import numpy as np

from llamadiff.ext.graph.op import Array, Op, op
from llamadiff.ext.graph.stored import kept_as


@op("CONT", "DUP", "CPY", "RESHAPE")
def copy(n: Op) -> Array:
    """The same values in the same order, in the result's shape and type (ggml_compute_forward_dup)."""
    x = n.x()
    return kept_as(np.ascontiguousarray(x).reshape(*x.shape[:-4], *n.shape), n.kind, n.source_kind(), n.q8)


@op("VIEW")
def view(n: Op) -> Array:
    """Another look at the same memory, given flat: params are offset and strides, int64, in values (ggml_view_4d)."""
    offset, *strides = (int(step) for step in np.frombuffer(n.params, np.int64))
    flat = np.ascontiguousarray(n.x()).reshape(-1)[offset:]
    steps = [step * flat.itemsize for step in strides]
    return np.array(np.lib.stride_tricks.as_strided(flat, n.shape, steps, writeable=False))


@op("PERMUTE")
def permute(n: Op) -> Array:
    """Axis i of the source becomes axis params[i], counted from ggml's innermost (ggml_permute)."""
    lead = n.x().ndim - 4
    order = [0] * 4
    for source, target in enumerate(n.ints[:4]):
        order[3 - int(target)] = lead + 3 - source
    return n.x().transpose(*range(lead), *order)


@op("TRANSPOSE")
def transpose(n: Op) -> Array:
    """The two innermost axes exchanged."""
    return n.x().swapaxes(-1, -2)


@op("CONCAT")
def concat(n: Op) -> Array:
    """Two tensors joined along axis params[0]."""
    lead = np.broadcast_shapes(n.x().shape[:-4], n.x(1).shape[:-4])
    parts = [np.broadcast_to(x, (*lead, *x.shape[-4:])) for x in (n.x(), n.x(1))]
    return np.concatenate(parts, axis=-1 - int(n.ints[0]))


@op("REPEAT")
def repeat(n: Op) -> Array:
    """Tiled up to the result's shape."""
    x = n.x()
    times = [want // have for want, have in zip(n.shape, x.shape[-4:], strict=True)]
    return np.tile(x, (*[1] * (x.ndim - 4), *times))


@op("GET_ROWS")
def get_rows(n: Op) -> Array:
    """Rows of [ne3, ne2, rows, ne0] by their numbers [1, ne3, ne2, k] -> [ne3, ne2, k, ne0]."""
    x, rows = n.alike(0, 1)
    rows = rows.astype(np.int64)[..., 0, :, :, :, None]  # [..., a, b, k, 1]: the matrix's outer axes come first
    rows = np.broadcast_to(rows, (*x.shape[:-2], *rows.shape[-2:]))
    return np.take_along_axis(x, rows, axis=-2)


@op("SET_ROWS")
def set_rows(n: Op) -> Array:
    """Rows written into a copy of the destination: values [ne3, ne2, k, ne0], numbers [1, ne3, ne2, k], destination.

    Numbers repeat over the outer axes where there are fewer. The destination may be stated with other axes.
    """
    values, numbers, out = n.alike(0, 1, 2)
    out, numbers = np.array(out, order="C").reshape(*out.shape[:-4], *n.shape), numbers.astype(np.int64)
    ne3, ne2 = values.shape[-4:-2]
    for i in range(ne3):
        for j in range(ne2):
            rows = numbers[..., 0, i % numbers.shape[-3], j % numbers.shape[-2], :, None]
            np.put_along_axis(out[..., i, j, :, :], rows, kept_as(values[..., i, j, :, :], n.kind, q8=n.q8), axis=-2)
    return out


@op("PAD")
def pad(n: Op) -> Array:
    """Zeros before and after: params are pairs from the innermost axis on (or wrapped around: params[8])."""
    widths = [(int(n.ints[2 * axis]), int(n.ints[2 * axis + 1])) for axis in (3, 2, 1, 0)]
    mode = "wrap" if n.ints[8] else "constant"
    return np.pad(n.x(), [*[(0, 0)] * (n.x().ndim - 4), *widths], mode=mode)  # type: ignore[call-overload,no-any-return]


@op("PAD_REFLECT_1D")
def pad_reflect_1d(n: Op) -> Array:
    """Mirrored at the ends of the innermost axis, whose own values are not repeated: params are before and after."""
    return np.pad(n.x(), [*[(0, 0)] * (n.x().ndim - 1), (int(n.ints[0]), int(n.ints[1]))], mode="reflect")


@op("ROLL")
def roll(n: Op) -> Array:
    """Turned by params[i] along ggml's axis i."""
    return np.roll(n.x(), [int(s) for s in n.ints[:4]], axis=(-1, -2, -3, -4))
