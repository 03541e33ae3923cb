"""Products. The first operand's type decides how the second one is rounded first (ggml-cpu.c, vec_dot_type)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from llamaref.sums import Matrix

from llamadiff.ext.graph.op import Array, Op, op

PRODUCTS = ("MUL_MAT", "MUL_MAT_ID")


@op("MUL_MAT", rounds=True)
def mul_mat(n: Op) -> Array:
    """w [.., out, in], x [.., rows, in] -> [.., rows, out]; outer axes of w serve several of x's (ggml_mul_mat)."""
    (x, *sums), minima = n.rounded(n.x(1), n.source_kind()), _minima(n)
    y = _by_slices(n.x(), x.astype(np.float32, copy=False))
    return y if not sums or minima is None else y + _by_slices(minima, sums[0])


def _minima(n: Op) -> Array | None:
    return None if n.sources[0] is None else n.sources[0].minima


def _by_slices(w: Array, x: Array) -> Array:
    if w.shape[-4] != x.shape[-4]:
        w = _repeated(w, x.shape[-4:-2])
    neighbours = x.reshape(*x.shape[:-3], w.shape[-3], -1, x.shape[-1])  # those that one slice of w serves
    y: Array = np.matmul(neighbours, w.swapaxes(-1, -2))
    return y.reshape(*_batch(w, x), *x.shape[-4:-1], w.shape[-2])


def _batch(w: Array, x: Array) -> tuple[int, ...]:
    return np.broadcast_shapes(w.shape[:-4], x.shape[:-4])


def _repeated(w: Array, outer: tuple[int, ...]) -> Array:
    """Each outer slice of w for as many neighbours of x's as it serves."""
    for axis, want in zip((-4, -3), outer, strict=True):
        if w.shape[axis] != want:
            w = np.repeat(w, want // w.shape[axis], axis=axis)
    return w


@op("MUL_MAT_ID", rounds=True)
def mul_mat_id(n: Op) -> Array:
    """w [1, expert, out, in], x [1, token, used or 1, in], ids [1, 1, token, used] -> [1, token, used, out]."""
    w: Array = n.x().reshape(n.x().shape[-3:])
    x, ids = n.alike(1, 2)
    ids = ids.astype(np.int64)[..., 0, 0, :, :]  # [..., token, used]
    x, *sums = n.rounded(x[..., 0, :, :, :], n.source_kind())
    x, *sums = (np.broadcast_to(each, (*ids.shape, each.shape[-1])) for each in (x, *sums))  # [..., token, used, in]
    minima = _minima(n)
    out = np.empty((*ids.shape, w.shape[-2]), np.float32)
    for expert in np.unique(ids):
        mine = ids == expert
        out[mine] = x[mine] @ w[expert].T
        if sums and minima is not None:
            out[mine] += sums[0][mine] @ minima.reshape(-1, *minima.shape[-2:])[expert].T
    return out[..., None, :, :, :]


@op("OUT_PROD")
def out_prod(n: Op) -> Array:
    """a [.., k, m], b [.., k, n] -> [.., n, m]: sums of outer products (ggml_out_prod)."""
    a = _repeated(n.x(), n.x(1).shape[-4:-2])
    return np.asarray(np.matmul(n.x(1).swapaxes(-1, -2), a))


def matrices(n: Op, w: Array, x: Array) -> Iterator[Matrix]:
    """The products of a node, each by one matrix; w and x are its operands on four axes."""
    if n.name == "MUL_MAT_ID":
        ids = n.x(2)[0, 0].astype(np.int64)  # [token, used]
        x = np.broadcast_to(x[0], (*ids.shape, x.shape[-1]))
        for expert in np.unique(ids):
            mine = np.nonzero(ids == expert)
            yield Matrix(w[0, expert], x[mine], (0, *mine))
        return
    for outer, head in np.ndindex(*x.shape[:2]):
        yield Matrix(w[outer * len(w) // len(x), head * w.shape[1] // x.shape[1]], x[outer, head], (outer, head))
