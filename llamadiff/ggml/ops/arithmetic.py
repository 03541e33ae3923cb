"""Arithmetic element by element, and sums. Smaller operands repeat over larger ones, as ggml_can_repeat allows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from llamadiff.ggml.op import Array, Op, op


def fitted(x: Array, shape: tuple[int, ...]) -> Array:
    """A second operand tiled to the first one's four axes."""
    times = [want // have if have != 1 else 1 for want, have in zip(shape, x.shape[-4:], strict=True)]
    return np.tile(x, (*[1] * (x.ndim - 4), *times)) if max(times) > 1 else x


_OF_TWO: dict[str, Callable[[Array, Array], Array]] = {
    "ADD": np.add, "ADD1": np.add, "SUB": np.subtract, "MUL": np.multiply, "DIV": np.divide,
}  # fmt: skip


@op(*_OF_TWO)
def of_two(n: Op) -> Array:
    """a and b, value by value."""
    return _OF_TWO[n.name](n.x(), fitted(n.x(1), n.x().shape[-4:]))


@op("ADD_ID")
def add_id(n: Op) -> Array:
    """a [.., token, used, n] + rows of b [.., expert, n] by their numbers [.., token, used] (ggml_add_id)."""
    a, b, ids = n.alike(0, 1, 2)
    rows = np.take_along_axis(b[..., 0, 0, :, :], ids.astype(np.int64).reshape(*ids.shape[:-4], -1, 1), axis=-2)
    return np.asarray(a + rows.reshape(a.shape))


@op("SCALE")
def scale(n: Op) -> Array:
    """x * params[0] + params[1]."""
    return np.asarray(n.x() * n.floats[0] + n.floats[1])


@op("CLAMP")
def clamp(n: Op) -> Array:
    """Between params[0] and params[1]."""
    return np.asarray(np.clip(n.x(), n.floats[0], n.floats[1]))


_OF_ROWS: dict[str, Callable[[Array], Array]] = {
    "SUM_ROWS": lambda x: x.sum(axis=-1, keepdims=True, dtype=np.float64),
    "MEAN": lambda x: x.mean(axis=-1, keepdims=True, dtype=np.float64),
    "CUMSUM": lambda x: x.cumsum(axis=-1, dtype=np.float64),
    "SUM": lambda x: x.sum(axis=(-4, -3, -2, -1), keepdims=True, dtype=np.float64),
}


@op(*_OF_ROWS)
def of_rows(n: Op) -> Array:
    """Sums, means and running sums over the innermost axis, or the sum of everything; in float64."""
    return np.asarray(_OF_ROWS[n.name](n.x()), np.float32)


@op("ARANGE")
def arange(n: Op) -> Array:
    """params: start, stop, step."""
    steps = n.floats[0] + n.floats[2] * np.arange(n.shape[-1], dtype=np.float32)
    return np.asarray(steps.reshape(n.shape), np.float32)


@op("FILL")
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


@op("DIAG_MASK_INF")
def diag_mask_inf(n: Op) -> Array:
    """-inf above the diagonal that lies params[0] to the right."""
    rows, columns = np.arange(n.shape[-2])[:, None], np.arange(n.shape[-1])[None, :]
    return np.where(columns > rows + int(n.ints[0]), np.float32(-np.inf), n.x())
