"""Products whose sums are kept in float16: in the orders in which devices add, or with what an unknown order leaves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llamadiff.ggml.op import Array, Op
from llamadiff.numerics import metrics, tolerances

MOST = 1 << 25  # products of two numbers that are added one by one: a second
ROWS, OUTPUTS = 4, 32  # of a matrix, by which its order is told and its loss estimated
FIRST = 2  # matrices of a node that tell the order
NEARLY = 0.9  # of a sample's values, which a wrong output may be among
LEAST = 64  # outputs that are looked at, however many products they take
KEPT_BITS = 16  # sums of a few float16 numbers have no more, of float32 numbers one in 256 has as few


@dataclass(frozen=True)
class Matrix:
    """One of the products of a node: w [out, in] and x [row, in] give what stands at ``place`` of the result."""

    w: Array
    x: Array
    place: tuple[Any, ...]

    def sampled(self) -> Matrix:
        """Some rows by some outputs of it, spread evenly."""
        rows, outputs = some(len(self.x), ROWS), some(len(self.w), OUTPUTS)
        return Matrix(self.w[outputs], self.x[rows], (rows, outputs))


def some(count: int, most: int) -> Array:
    """Places, spread evenly."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(int))


@dataclass(frozen=True)
class Order:
    """How a sum goes on: of every ``step`` channels the last one first; ``fused``: a product is not rounded itself."""

    step: int
    fused: bool

    def channels(self, count: int) -> Iterator[int]:
        for start in range(0, count, self.step):
            yield from reversed(range(start, min(start + self.step, count)))


ORDERS = tuple(Order(step, fused) for step in (4, 2, 1) for fused in (False, True))


def matrices(n: Op, w: Array, x: Array) -> Iterator[Matrix]:
    """The products of a node, w and x being its operands on four axes."""
    if n.name == "MUL_MAT_ID":
        ids = n.x(2)[0, 0].astype(np.int64)  # [token, used]
        x = np.broadcast_to(x[0], (*ids.shape, x.shape[-1]))
        for expert in np.unique(ids):
            mine = np.nonzero(ids == expert)
            yield Matrix(w[0, expert], x[mine], (0, *mine))
        return
    for outer, head in np.ndindex(*x.shape[:2]):
        yield Matrix(w[outer * len(w) // len(x), head * w.shape[1] // x.shape[1]], x[outer, head], (outer, head))


def added(m: Matrix, order: Order) -> Array:
    """x @ w.T [row, out] of float16's numbers, every sum rounded to float16."""
    kind = np.float64 if order.fused else np.float32  # in float32, products and sums of such numbers round once
    w, x = np.ascontiguousarray(m.w.T, kind), np.ascontiguousarray(m.x.T, kind)
    total = np.zeros((x.shape[1], w.shape[1]), kind)
    for channel in order.channels(len(w)):
        product = x[channel][:, None] * w[channel]
        total = _half(total + (product if order.fused else _half(product)))
    return total


def _half(x: Array) -> Array:
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(x.dtype)


def order_of(ms: Sequence[Matrix], found: Array, likely: Order | None = None) -> Order | None:
    """The order that gives what was found, in nearly all of a sample of the first products; None if none does.

    The ``likely`` one is tried first.
    """
    samples = [m.sampled() for m in ms[:FIRST]]
    values = [found[m.place][np.ix_(*some.place)] for m, some in zip(ms, samples, strict=False)]
    best, fits = None, NEARLY
    for order in sorted(ORDERS, key=lambda order: order != likely):
        equal = [added(some, order) == value for some, value in zip(samples, values, strict=True)]
        share = float(np.mean(np.concatenate([same.reshape(-1) for same in equal]))) if equal else 0.0
        if share > fits:
            best, fits = order, share
        if share == 1:
            break
    return best


def lost(ms: Iterable[Matrix]) -> float:
    """NMSE that sums kept in float16 have, in whatever order: each product and each sum is rounded once."""
    rounded, total = 0.0, 0.0
    for m in ms:
        some = m.sampled()
        products = some.x[:, None, :].astype(np.float64) * some.w
        sums = np.cumsum(products, axis=-1)
        rounded += float(np.square(sums).sum() + np.square(products).sum())
        total += float(np.square(sums[..., -1]).sum())
    return metrics.ratio(tolerances.ROUNDING["f16"] * rounded, total)


def kept_in_half(found: Array) -> bool:
    """Whether results show that they are float16 numbers, or sums of a few such."""
    values = np.ascontiguousarray(found, np.float32).reshape(-1)
    values = values[np.isfinite(values) & (values != 0)]
    short = values.view(np.uint32) & np.uint32((1 << (24 - KEPT_BITS)) - 1) == 0
    return values.size > 0 and float(short.mean()) > 0.9
