"""Products whose sums are kept in float16: in the orders in which kernels add, or with what an unknown order leaves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from llamaref.sums import Matrix
from numpy.typing import NDArray

from llamadiff.numerics import cpu, metrics, tolerances
from llamadiff.numerics.policies import CACHE_K, CACHE_V

Array = NDArray[Any]

MOST = 1 << 25  # products of two numbers that are added one by one: a second
ROWS, OUTPUTS = 4, 32  # of a matrix, by which its order is told and its loss estimated
FIRST = 2  # matrices of a node that tell the order
NEARLY = 0.9  # of a sample's values, which a wrong output may be among
LEAST = 64  # outputs that are looked at, however many products they take
KEPT_BITS = 16  # sums of a few float16 numbers have no more, of float32 numbers one in 256 has as few


def sampled(part: Matrix) -> Matrix:
    """Some rows by some outputs of a matrix, spread evenly."""
    rows, outputs = some(len(part.x), ROWS), some(len(part.w), OUTPUTS)
    return Matrix(part.w[outputs], part.x[rows], (rows, outputs))


def some(count: int, most: int) -> Array:
    """Places, spread evenly."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(int))


class Order(ABC):
    """In which order a kernel adds, every sum rounded to float16."""

    @abstractmethod
    def added(self, w: Array, x: Array) -> Array:
        """x @ w.T [row, out] of float16's numbers, float32."""

    @abstractmethod
    def squares(self, products: Array) -> float:
        """The squares of all that is rounded on the way to sums over the last axis."""


@dataclass(frozen=True)
class OneByOne(Order):
    """One channel after the other: of every ``step`` the last one first; ``fused``: a product is not rounded itself."""

    step: int
    fused: bool

    def __str__(self) -> str:
        return f"{self.step} channels at a time" + ", fused" * self.fused

    def added(self, w: Array, x: Array) -> Array:
        kind = np.float64 if self.fused else np.float32  # in float32, products and sums of such numbers round once
        w, x = np.ascontiguousarray(w.T, kind), np.ascontiguousarray(x.T, kind)
        total = np.zeros((x.shape[1], w.shape[1]), kind)
        for channel in self._channels(len(w)):
            product = x[channel][:, None] * w[channel]
            total = _half(total + (product if self.fused else _half(product)))
        return np.asarray(total, np.float32)

    def _channels(self, count: int) -> Iterator[int]:
        for start in range(0, count, self.step):
            yield from reversed(range(start, min(start + self.step, count)))

    def squares(self, products: Array) -> float:
        sums = np.cumsum(products, axis=-1)
        return float(np.square(sums).sum() + (0.0 if self.fused else np.square(products).sum()))


@dataclass(frozen=True)
class Lanes(Order):
    """Every ``count``-th channel to one sum, products not rounded. Sums are halved to eight in float16, then added in
    float32; channels that are no whole step come last, in float64 (ggml_vec_dot_f16, GGML_F16x8_REDUCE).
    """

    count: int

    def __str__(self) -> str:
        return f"in {self.count} lanes"

    def added(self, w: Array, x: Array) -> Array:
        w, x = np.ascontiguousarray(w.T, np.float64), np.ascontiguousarray(x.T, np.float64)
        whole = len(w) - len(w) % self.count
        sums = np.zeros((self.count, x.shape[1], w.shape[1]))
        for start in range(0, whole, self.count):
            some = slice(start, start + self.count)
            sums = _half(sums + x[some, :, None] * w[some, None])
        while len(sums) > cpu.TILE_LANES:
            sums = _half(sums[: len(sums) // 2] + sums[len(sums) // 2 :])
        a = sums.astype(np.float32)
        a = a[:4] + a[4:]
        total = ((a[0] + a[1]) + (a[2] + a[3])).astype(np.float64)
        for channel in range(whole, len(w)):
            total += x[channel][:, None] * w[channel]
        return np.asarray(total, np.float32)

    def squares(self, products: Array) -> float:
        whole = products.shape[-1] - products.shape[-1] % self.count
        lanes = products[..., :whole].reshape(*products.shape[:-1], -1, self.count)
        sums = np.cumsum(lanes, axis=-2)
        squares = float(np.square(sums).sum())
        left = sums[..., -1, :] if whole else np.zeros((*products.shape[:-1], self.count))
        while left.shape[-1] > cpu.TILE_LANES:
            left = left[..., : left.shape[-1] // 2] + left[..., left.shape[-1] // 2 :]
            squares += float(np.square(left).sum())
        return squares


OF_DEVICES: tuple[Order, ...] = tuple(OneByOne(step, fused) for step in (4, 2, 1) for fused in (False, True))
OF_CPUS: tuple[Order, ...] = tuple(map(Lanes, cpu.HALF_LANES))
# Ways of engines, besides those that go by a product's shape as ggml's do on CPUs (numerics/cpu.py).
FIXED = {f"float16, {order}": order for order in (*OF_CPUS, *OF_DEVICES)}
WAYS = (cpu.IN_HALF_TILES, cpu.IN_HALF, *FIXED)


def order_for(sums: str, rows: int, channels: int, outputs: int) -> Order:
    """The order that a way of WAYS has for a product of so many rows at once."""
    return FIXED[sums] if sums in FIXED else Lanes(cpu.lanes_of(sums, rows, channels, outputs))


def _half(x: Array) -> Array:
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(x.dtype)


def order_of(
    parts: Sequence[Matrix], found: Array, orders: Sequence[Order], likely: Order | None = None
) -> Order | None:
    """The order that gives what was found, in nearly all of a sample of the first products; None if none does.

    The ``likely`` one is tried first.
    """
    samples = [sampled(part) for part in parts[:FIRST]]
    values = [found[part.place][np.ix_(*some.place)] for part, some in zip(parts, samples, strict=False)]
    best, fits = None, NEARLY
    for order in sorted(orders, key=lambda order: order != likely):
        equal = [order.added(some.w, some.x) == value for some, value in zip(samples, values, strict=True)]
        share = float(np.mean(np.concatenate([same.reshape(-1) for same in equal]))) if equal else 0.0
        if share > fits:
            best, fits = order, share
        if share == 1:
            break
    return best


def lost(parts: Iterable[Matrix], order: Order) -> float:
    """NMSE that sums kept in float16 have, of which each is rounded once."""
    rounded, total = 0.0, 0.0
    for some in map(sampled, parts):
        products = some.x[:, None, :].astype(np.float64) * some.w
        rounded += order.squares(products)
        total += float(np.square(products.sum(axis=-1)).sum())
    return metrics.ratio(tolerances.ROUNDING["f16"] * rounded, total)


def kept_in_half(found: Array) -> bool:
    """Whether results show that they are float16 numbers, or sums of a few such."""
    values = np.ascontiguousarray(found, np.float32).reshape(-1)
    values = values[np.isfinite(values) & (values != 0)]
    short = values.view(np.uint32) & np.uint32((1 << (24 - KEPT_BITS)) - 1) == 0
    return values.size > 0 and float(short.mean()) > 0.9


def outputs_to_follow(shape: Sequence[int], channels: int) -> Array:
    """Of a result of this shape, as many outputs as time allows."""
    width = shape[-1]
    rows = int(np.prod(shape[:-1], dtype=np.int64))
    return some(width, max(LEAST, MOST // max(1, rows * channels)))


@dataclass(frozen=True)
class Kernel:
    """How a product is added: ``sums`` is one of WAYS; over ``batches`` of rows, or each row ``by_row``.

    ``is_k``, ``is_v``: the weights are a cache's, which has room for whole steps of keys.
    """

    sums: str
    batches: Sequence[slice] = (slice(None),)
    by_row: bool = False
    is_k: bool = False
    is_v: bool = False

    def accumulate(self, y: Array, parts: Iterable[Matrix]) -> float:
        """Add its parts into a product, as many outputs as time allows -> the NMSE that the others have."""
        every = [part for whole in parts for part in self._in_batches(whole)]
        count = sum(part.x.size * len(part.w) for part in every)
        most = min(1.0, MOST / max(1, count))
        return max((self._put_one(y, part, most) for part in every), default=0.0)

    def order(self, sums: str, part: Matrix) -> Order:
        """The one that a part is added in, of one batch."""
        rows, outputs = 1 if self.by_row else len(part.x), 0 if self.is_k else len(part.w)
        return order_for(sums, rows, part.x.shape[1], outputs)

    def orders_shown(self, y: Array, parts: Iterable[Matrix]) -> set[str]:
        """The WAYS in which the first part of a product y was added, as a sample of each batch shows."""
        ways = set(WAYS)
        for part in self._in_batches(next(iter(parts))):
            place, some_rows = part.place
            few = sampled(part)
            found = y[place][some_rows][np.ix_(*few.place)]
            equal = {order: self._gives(order, few, found) for order in {self.order(way, part) for way in ways}}
            ways = {way for way in ways if equal[self.order(way, part)]}
        return ways

    def _gives(self, order: Order, few: Matrix, found: Array) -> bool:
        return bool(np.mean(order.added(few.w, few.x) == found) > NEARLY)

    def _in_batches(self, whole: Matrix) -> Iterator[Matrix]:
        w, x = (_whole_steps(side) for side in (whole.w, whole.x)) if self.is_v else (whole.w, whole.x)
        if self.by_row:
            yield Matrix(w, x, (whole.place, ...))
            return
        for some_rows in self.batches:
            if len(x[some_rows]):
                yield Matrix(w, x[some_rows], (whole.place, some_rows))

    def _put_one(self, y: Array, part: Matrix, most: float) -> float:
        order = self.order(self.sums, part)
        followed = some(len(part.w), max(LEAST, int(most * len(part.w))))
        place, some_rows = part.place
        values = np.array(y[place][some_rows])
        values[:, followed] = order.added(part.w[followed], part.x)
        if self.by_row:
            y[place] = values
        else:
            y[place][some_rows] = values
        return lost([part], order) if len(followed) < len(part.w) else 0.0


def _whole_steps(x: Array) -> Array:
    """Rows with zeros behind them, up to whole steps of any kernel."""
    return np.pad(x, ((0, 0), (0, -x.shape[1] % max(cpu.HALF_LANES))))


def kernel(sums: str, kind: str, edges: Sequence[int], start: int, by_row: bool) -> Kernel:
    """What adds products of a kind of operands, rows from the ``start``-th on; ``edges``: of batches."""
    own = [max(0, edge - start) for edge in edges]
    batches = [slice(*ends) for ends in pairwise(own)] or [slice(None)]
    return Kernel(sums, batches, by_row, is_k=kind == CACHE_K, is_v=kind == CACHE_V)
