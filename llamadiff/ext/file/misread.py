"""How a stranger misread a type's blocks: they are misread in every known way, and the one that fits is named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from llamaref import ModelError, Weights
from llamaref.weights import block_sizes
from numpy.typing import NDArray

from llamadiff.ext.file.blocks.any_type import layout_errors, sixteen_bit_errors
from llamadiff.ext.file.blocks.fields import FIELDS, values_of
from llamadiff.ext.file.blocks.known import KNOWN
from llamadiff.ext.file.blocks.misreading import Misreading, displaced
from llamadiff.ext.file.blocks.scales import WHOLE_NUMBERS
from llamadiff.ext.file.distance import run_in_words
from llamadiff.ext.file.orders import order_in_words

Array = NDArray[Any]
FIRST = 512  # blocks that a misreading is tried on before all
NEAR = 1e-5  # squared error of a block, by its size, that a right reading may leave: sixteen-bit values have less
SHARE = 0.99  # of the blocks must fit: engines may do something else at the ends


@dataclass(frozen=True)
class ForeignBlocks:
    """A tensor's blocks, their type, and what a stranger made of them: [block, value]."""

    kind: str
    blocks: Array
    got: Array
    right: Array

    def decoded(self, blocks: Array) -> Array:
        """Any bytes as the type says."""
        return values_of(self.kind, blocks)

    def head(self, count: int) -> ForeignBlocks:
        """The first of them."""
        return ForeignBlocks(self.kind, self.blocks[:count], self.got[:count], self.right[:count])

    def is_given_by(self, misreading: Misreading) -> bool:
        """Whether the stranger's values are those of a misreading, but for a few blocks."""
        try:
            values = misreading.read(self.blocks, self.decoded)
        except (ModelError, ValueError, IndexError, KeyError):  # it is none of such blocks
            return False
        got = self.got[: len(values)]
        return bool(np.isfinite(got).any() and _alike(got, values).mean() >= SHARE)


def _alike(got: Array, values: Array) -> Array:
    """Which blocks are the same: [block]."""
    a, b = got.astype(np.float64), values.astype(np.float64)
    with np.errstate(all="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b)) | (np.isinf(a) & np.isinf(b))
        gap = np.where(same, 0.0, a - b)
        size = np.where(np.isfinite(b), b, 0.0)
        error = np.einsum("ij,ij->i", gap, gap)
        return np.asarray(error <= NEAR * np.einsum("ij,ij->i", size, size))


@np.errstate(all="ignore")  # what is no scale may be anything
def misreading(weights: Weights, name: str, values: Array) -> Misreading | None:
    """What gives a stranger's values of a tensor; None if no known misreading does, or they are right."""
    kind = weights.type(name)
    if kind not in FIELDS:
        return None
    per_block, size = block_sizes(kind)
    stored = np.ascontiguousarray(weights.read_raw(name)).view(np.uint8)
    per_row, stored = stored.shape[-1] // size, stored.reshape(-1, size)
    right = values_of(kind, stored)
    if per_block == 1:  # types without blocks: some values at a time
        per_block = per_row = next(n for n in (32, 16, 8, 4, 2, 1) if len(stored) % n == 0)
        stored = stored.reshape(-1, size * per_block)
    whole = ForeignBlocks(kind, stored, values.reshape(-1, per_block), right.reshape(-1, per_block))
    first = whole.head(-(-FIRST // per_row) * per_row)  # rows are whole
    if kind in ("F16", "BF16"):
        ways = chain(sixteen_bit_errors(kind), _unwritten(first, f"{per_block}"))
    else:
        ways = chain(_unwritten(first, f"{kind} block"), _of_blocks(weights, name, first, per_row))
    return next((way for way in ways if first.is_given_by(way) and whole.is_given_by(way)), None)


def _of_blocks(weights: Weights, name: str, some: ForeignBlocks, per_row: int) -> Iterator[Misreading]:
    """Every misreading of a type of blocks, the likeliest first."""
    for known in KNOWN:
        yield from known.of(some.kind, per_row)
    if some.kind in WHOLE_NUMBERS:
        for says, _, rows in displaced(weights, name):
            values = weights.decode_rows(name, rows).reshape(-1, some.got.shape[1])
            yield Misreading(says, lambda b, _, values=values: values[: len(b)], cause="tensor-offset-wrong")  # type: ignore[misc]
    yield from layout_errors(some.kind)
    yield from _multiplied(some)
    yield from _rearranged(some)


def _multiplied(some: ForeignBlocks) -> Iterator[Misreading]:
    """One factor for all values: what half the blocks have less of, and half more."""
    good = np.isfinite(some.got).all(axis=1) & some.right.any(axis=1)
    got, right = (side[good].astype(np.float64) for side in (some.got, some.right))
    with np.errstate(all="ignore"):
        factor = float(np.median((got * right).sum(axis=1) / (right**2).sum(axis=1))) if len(got) else 0.0
    if factor and np.isfinite(factor):
        says = f"multiplies {some.kind}'s values by {factor:.6g}"
        yield Misreading(says, lambda blocks, decode: decode(blocks) * np.float32(factor), cause="factor")


def _rearranged(some: ForeignBlocks) -> Iterator[Misreading]:
    """The same order within all blocks, whatever it is: found by the values that stand at each place."""
    good = np.isfinite(some.got).all(axis=1) & np.isfinite(some.right).all(axis=1) & some.right.any(axis=1)
    got, right = (side[good].astype(np.float64) for side in (some.got, some.right))
    if len(got) < 4:
        return
    scale = np.maximum(np.abs(right).max(axis=1, keepdims=True), 1e-300)
    got, right = got / scale, right / scale
    with np.errstate(all="ignore"):
        like = got.T @ right / np.sqrt(np.maximum((got**2).sum(axis=0)[:, None] * (right**2).sum(axis=0), 1e-300))
    order = like.argmax(axis=1)
    if len(set(order.tolist())) == len(order) and not (order == np.arange(len(order))).all():
        says = _order_in_words(some.kind, order)
        yield Misreading(says, lambda blocks, decode: decode(blocks)[:, order], cause="order-in-block")


def _order_in_words(kind: str, order: Array) -> str:
    """An order of a block's values, by its name if it has one."""
    count = len(order)
    here = np.arange(count)
    for size in (count, 64, 128, 32, 16):
        if size > count or count % size:
            continue
        local = here.reshape(-1, 2, size // 2).swapaxes(1, 2).reshape(-1)
        if (order == local).all():
            return f"takes a {kind} byte's parts for neighbours: they are {size // 2} values apart"
        if (order == np.roll(here.reshape(-1, 2, size // 2), 1, axis=1).reshape(-1)).all():
            return f"swaps the halves of every {size} values of {kind}: the high and low nibbles"
    return f"within each {kind} block, {order_in_words(order, 'value')}"


def _unwritten(some: ForeignBlocks, each: str) -> Iterator[Misreading]:
    """A part of every block is left zero."""
    unset = (some.got == 0).all(axis=0) & (some.right != 0).any(axis=0)
    if unset.any():
        where = run_in_words(np.flatnonzero(unset), "value", len(unset))
        says = f"leaves {where} of each {each} zero"
        yield Misreading(says, lambda blocks, decode: np.where(unset, 0, decode(blocks)), cause="not-written")
