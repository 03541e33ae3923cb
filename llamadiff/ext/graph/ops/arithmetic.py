"""Arithmetic element by element, and sums. Smaller operands repeat over larger ones, as ggml_can_repeat allows."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from llamadiff.ext.graph.op import Array, Kernels, Op, op
from llamadiff.numerics.tolerances import ROUNDING


def fitted(x: Array, shape: tuple[int, ...]) -> Array:
    """A second operand tiled to the first one's four axes."""
    times = [want // have if have != 1 else 1 for want, have in zip(shape, x.shape[-4:], strict=True)]
    return np.tile(x, (*[1] * (x.ndim - 4), *times)) if max(times) > 1 else x


_OF_TWO: dict[str, Callable[[Array, Array], Array]] = {
    "ADD": np.add, "ADD1": np.add, "SUB": np.subtract, "MUL": np.multiply, "DIV": np.divide,
}  # fmt: skip


@op(*_OF_TWO, stored=True)
def of_two(n: Op) -> Array:
    """a and b, value by value."""
    return _OF_TWO[n.name](n.x(), fitted(n.x(1), n.x().shape[-4:]))


@op("ADD_ID")
def add_id(n: Op) -> Array:
    """a [.., token, used, n] + rows of b [.., expert, n] by their numbers [.., token, used] (ggml_add_id)."""
    a, b, ids = n.alike(0, 1, 2)
    rows = np.take_along_axis(b[..., 0, 0, :, :], ids.astype(np.int64).reshape(*ids.shape[:-4], -1, 1), axis=-2)
    return np.asarray(a + rows.reshape(a.shape))


@op("SCALE", stored=True)
def scale(n: Op) -> Array:
    """x * params[0] + params[1]."""
    return np.asarray(n.x() * n.floats[0] + n.floats[1])


@op("CLAMP", stored=True)
def clamp(n: Op) -> Array:
    """Between params[0] and params[1]."""
    return np.asarray(np.clip(n.x(), n.floats[0], n.floats[1]))


_OF_ROWS: dict[str, Callable[[Array], Array]] = {
    "SUM_ROWS": lambda x: x.sum(axis=-1, keepdims=True, dtype=np.float64),
    "MEAN": lambda x: x.mean(axis=-1, keepdims=True, dtype=np.float64),
    "CUMSUM": lambda x: x.cumsum(axis=-1, dtype=np.float64),
    "SUM": lambda x: x.sum(axis=(-4, -3, -2, -1), keepdims=True, dtype=np.float64),
}


@op(*_OF_ROWS, stored=True)
def of_rows(n: Op) -> Array:
    """Sums, means and running sums over the innermost axis, or the sum of everything; in float64."""
    return np.asarray(_OF_ROWS[n.name](n.x()), np.float32)


@op("ARANGE")
def arange(n: Op) -> Array:
    """params: start, stop, step."""
    steps = n.floats[0] + n.floats[2] * np.arange(n.shape[-1], dtype=np.float32)
    return np.asarray(steps.reshape(n.shape), np.float32)


@op("FILL", stored=True)
def fill(n: Op) -> Array:
    """params[0] everywhere."""
    return np.full(n.shape, n.floats[0], np.float32)


@op("TRI")
def triangle(n: Op) -> Array:
    """A triangle of each matrix: params[0] is 0 upper with diagonal, 1 upper, 2 lower with diagonal, 3 lower."""
    rows, columns = np.arange(n.shape[-2])[:, None], np.arange(n.shape[-1])[None, :]
    keep = [columns >= rows, columns > rows, columns <= rows, columns < rows][int(n.ints[0])]
    return np.where(keep, n.x(), np.float32(0))


@op("DIAG")
def diagonal(n: Op) -> Array:
    """A row as the diagonal of a matrix."""
    return np.asarray(n.x() * np.eye(n.shape[-1], dtype=np.float32))


@op("DIAG_MASK_INF", "DIAG_MASK_ZERO")
def diag_mask(n: Op) -> Array:
    """-inf, or 0, above the diagonal that lies params[0] to the right."""
    hidden = np.float32(-np.inf if n.name == "DIAG_MASK_INF" else 0)
    rows, columns = np.arange(n.shape[-2])[:, None], np.arange(n.shape[-1])[None, :]
    return np.where(columns > rows + int(n.ints[0]), hidden, n.x())


@op("COUNT_EQUAL")
def count_equal(n: Op) -> Array:
    """How many places of two tensors hold the same whole number."""
    return np.asarray((n.x() == n.x(1)).sum(axis=(-4, -3, -2, -1), keepdims=True), np.int64)


def _row_by_row(n: Op) -> float:
    """Losses of rows are added in float32."""
    return math.prod(n.x().shape[:-1]) * ROUNDING["f32"]


@op("CROSS_ENTROPY_LOSS", rounds=Kernels(unfollowed=_row_by_row))
def cross_entropy_loss(n: Op) -> Array:
    """-sum of labels times the log of softmax(x), over the number of rows (ggml_compute_forward_cross_entropy_loss)."""
    x, labels = n.x().astype(np.float64), n.x(1).astype(np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    logs = x - np.log(np.exp(x).sum(axis=-1, keepdims=True))
    rows = math.prod(x.shape[-4:-1])
    return np.asarray(-(logs * labels).sum(axis=(-4, -3, -2, -1), keepdims=True) / rows, np.float32)
