"""Ops whose first source is a weight of the file: its rows are decoded as they are needed, and never kept whole."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from llamaref import Weights

from llamadiff.ext.graph.op import Array, Op, Operand

Operands = Callable[[Array, str], tuple[Array, ...]]  # activations as they are multiplied by weights of a type
Streamed = Callable[[Op, Operand, Weights, Operands], Array | None]


def streamed(n: Op, weights: Weights, operands: Operands) -> Array | None:
    """What an op gives, [..., ne3, ne2, ne1, ne0]; None if it needs the weight whole, or reads none.

    ``operands`` rounds activations; behind them come what Q8_1 adds to the sums of their blocks.
    """
    weight = n.sources[0] if n.sources else None
    if n.name not in STREAMED or weight is None or weight.name not in weights:
        return None
    return STREAMED[n.name](n, weight, weights, operands)


def _rows(n: Op, weight: Operand, weights: Weights, operands: Operands) -> Array:
    rows, decode = n.x(1), weight.decode
    read = weights.rows if decode is None else lambda name, of: decode(weights.read_raw(name, of))
    found = read(weight.name, rows.reshape(-1))
    return np.asarray(found).reshape(*rows.shape[:-4], *n.shape)


def _product(n: Op, weight: Operand, weights: Weights, operands: Operands) -> Array | None:
    """By one matrix, or each head by a matrix of its own."""
    outer, heads = ([size for size in shape if size > 1] for shape in (weights.shape(weight.name)[:-2], n.shape[:2]))
    if outer not in ([], heads):
        return None
    multiply = weights.heads if outer else weights.product
    y = multiply(weight.name, *operands(n.x(1), weight.kind), decode=weight.decode)
    return y.reshape(*y.shape[:-4], *n.shape)


def _experts(n: Op, weight: Operand, weights: Weights, operands: Operands) -> Array:
    x, ids = n.x(1)[..., 0, :, :, :], n.x(2)[..., 0, 0, :, :].astype(np.int64)  # [..., token, used or 1, in]
    batch = np.broadcast_shapes(x.shape[:-1], ids.shape)
    x, *sums = operands(np.ascontiguousarray(np.broadcast_to(x, (*batch, x.shape[-1]))), weight.kind)
    y = weights.experts(weight.name, x, np.broadcast_to(ids, x.shape[:-1]), *sums, decode=weight.decode)
    return y.reshape(*y.shape[:-3], *n.shape)


STREAMED: dict[str, Streamed] = {"MUL_MAT": _product, "MUL_MAT_ID": _experts, "GET_ROWS": _rows}
