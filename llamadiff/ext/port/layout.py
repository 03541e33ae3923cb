"""How a node's values lie in an op's: which axes are which, whether pairs are halves, and in which order rows are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.ext.port.alignment import SAME, distance

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Layout:
    """``shape`` is the op's, without ones, and ``axes`` are its, in the node's order; ``pairs``: the node's last axis
    has pairs where the op's has halves. ``rows``: which of the op's rows each of the node's is, where they are sorted,
    as those of experts are; ``columns``: the same of columns, as a converter may have permuted those of heads.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    pairs: bool = False
    rows: Array | None = None
    columns: Array | None = None

    def of_node(self, values: Array, shape: tuple[int, ...]) -> Array:
        """An op's values as the node has them."""
        if self.rows is not None:
            return values.reshape(len(self.rows), -1)[self.rows].reshape(shape)
        if self.columns is not None:
            return values.reshape(-1, len(self.columns))[:, self.columns].reshape(shape)
        here = values.reshape(self.shape)
        return (_pairs(here) if self.pairs else here).transpose(self.axes).reshape(shape)

    def holds(self, node: Array, op: Array) -> bool:
        """Whether a node has an op's values in this order."""
        return distance(self.of_node(op, node.shape).ravel(), node.ravel()) <= SAME


@dataclass(frozen=True)
class Moved:
    """The orders of rows and of columns in which a model has what nodes have."""

    rows: Sequence[Array] = ()
    columns: Sequence[Array] = ()


STRAIGHT = Moved()


def layouts(node: tuple[int, ...], op: Array, moved: Moved = STRAIGHT) -> Iterator[Layout]:
    """Those in which an op's values can be laid out as a node of this shape."""
    shape = tuple(size for size in op.shape if size > 1) or (1,)
    wanted = [size for size in node if size > 1]
    if op.dtype.kind != "f" or op.size != np.prod(node):
        return
    split = tuple(wanted) if shape != tuple(wanted) and _fits(wanted, shape) else None
    for sizes in filter(None, (shape, split)):
        for axes in permutations(range(len(sizes))) if len(sizes) <= 4 else ():
            if _fits([sizes[axis] for axis in axes], wanted):
                for pairs in (False, True) if sizes[-1] % 2 == 0 else (False,):
                    yield Layout(sizes, axes, pairs)
    for rows in moved.rows:
        if op.size % len(rows) == 0 and op.size // len(rows) in (node[-1], op.shape[-1]):
            yield Layout(shape, (), rows=rows)
    for columns in moved.columns:
        if op.shape[-1] == len(columns):
            yield Layout(shape, (), columns=columns)


def nearest_layout(node: Array, op: Array, moved: Moved = STRAIGHT) -> Layout | None:
    """The order in which an op's values are nearest to a node's; None where they cannot be laid out so."""
    found = layouts(node.shape, op, moved)
    return min(found, key=lambda each: distance(each.of_node(op, node.shape).ravel(), node.ravel()), default=None)


def sorted_rows(node: Array, op: Array) -> Array | None:
    """Which of an op's rows each of a node's is, where they have the same ones; None where rows are not all different.

    Rows are along the last axis of the node, and as long as the op's.
    """
    if node.shape[-1] != op.shape[-1] or node.size != op.size or node.shape[-1] == 1:
        return None
    mine, theirs = (x.reshape(-1, x.shape[-1]) for x in (node, op))
    places, others = (np.argsort(x[:, 0], kind="stable") for x in (mine, theirs))
    rows = np.empty(len(mine), int)
    rows[places] = others
    same = distance(theirs[rows].ravel(), mine.ravel()) <= SAME
    return rows if same and not np.array_equal(rows, np.arange(len(rows))) else None


def sorted_columns(node: Array, op: Array) -> Array | None:
    """Which of an op's columns each of a node's is, where they have the same ones."""
    if node.size != op.size or node.shape[-1] != op.shape[-1] or node.size == node.shape[-1]:
        return None
    return sorted_rows(*(np.ascontiguousarray(x.reshape(-1, x.shape[-1]).T) for x in (node, op)))


def _fits(parts: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether axes can be joined, in their order, to the wanted ones."""
    left = list(parts)
    for size in wanted:
        product = 1
        while product < size and left:
            product *= left.pop(0)
        if product != size:
            return False
    return not left


def _pairs(x: Array) -> Array:
    return x.reshape(*x.shape[:-1], 2, -1).swapaxes(-1, -2).reshape(x.shape)
