"""How a stranger misread a type's blocks: they are misread in every known way, and the one that fits is named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from llamaref import ModelError, Weights
from llamaref.weights import block_sizes, decode
from numpy.typing import NDArray

from llamadiff.diagnose.bugs import quant_scales  # noqa: F401  (registers its misreadings)
from llamadiff.diagnose.bugs.quant_blocks import FIELDS, MISREADINGS, StoredWeight
from llamadiff.numerics.orders import order_in_words
from llamadiff.weights.distance import run_in_words
from llamadiff.weights.foreign_blocks import Decode, ForeignBlocks, Misreading, Way
from llamadiff.weights.layout_errors import layout_errors, sixteen_bit_errors
from llamadiff.weights.layouts import LAYOUTS

Array = NDArray[Any]
FIRST = 512  # blocks that a misreading is tried on before all


@np.errstate(all="ignore")  # what is no scale may be anything
def misreading(weights: Weights, name: str, values: Array) -> Misreading | None:
    """What gives a stranger's values of a tensor; None if no known misreading does, or they are right."""
    kind = weights.type(name)
    per_block, size = block_sizes(kind)
    stored = np.ascontiguousarray(weights.stored(name)).view(np.uint8).reshape(-1, size)
    if kind not in LAYOUTS:
        return None
    wide = _wide(kind, len(stored))
    if wide > 1:  # types without blocks: some values at a time
        stored, per_block = stored.reshape(-1, size * wide), wide
    whole = ForeignBlocks(kind, stored, values.reshape(-1, per_block), _right(kind, stored, size))
    first = whole.head(FIRST)
    for told, misread in _ways(weights, name, first, wide):
        try:
            again = misread(whole.blocks) if first.is_given_by(misread(first.blocks)) else None
        except (ModelError, ValueError, IndexError, KeyError):
            continue
        if again is not None and whole.is_given_by(again):
            return told
    return None


def _wide(kind: str, count: int) -> int:
    """How many values of a type without blocks are looked at together; 1 for types of blocks."""
    if block_sizes(kind)[0] > 1:
        return 1
    return next(n for n in (32, 16, 8, 4, 2, 1) if count % n == 0)


def _right(kind: str, stored: Array, size: int) -> Array:
    with np.errstate(all="ignore"):
        return decode(kind, _natural(kind, stored.reshape(-1, size))).reshape(len(stored), -1)


def _natural(kind: str, blocks: Array) -> Array:
    """Bytes as gguf-py wants them: float16 as such."""
    return blocks.view(np.float16) if kind == "F16" else blocks


def _ways(weights: Weights, name: str, some: ForeignBlocks, wide: int) -> Iterator[Way]:
    """Every misreading of a type, the likeliest first."""
    if wide > 1 or some.kind in ("F16", "BF16"):
        yield from sixteen_bit_errors(some)
        return
    yield from _unwritten(some)
    yield from _known(weights, name, some)
    yield from layout_errors(some)
    yield from _rearranged(some)


def _known(weights: Weights, name: str, some: ForeignBlocks) -> Iterator[Way]:
    """What diagnosis knows of misread weights, asked of this tensor alone."""
    if some.kind not in FIELDS:
        return
    for known in MISREADINGS.values():
        for reading in known.readings(StoredWeight(weights, name)):
            yield Misreading(known.name, reading.says), _reader(weights, name, some, reading.weight)


def _reader(weights: Weights, name: str, some: ForeignBlocks, read_so: StoredWeight) -> Decode:
    """A changed weight's values, of as many blocks as are asked for."""
    stored = weights.stored(name)
    per_row = stored.shape[-1] // some.blocks.shape[1]

    def read(blocks: Array) -> Array:
        count = len(blocks)
        rows = -(-count // per_row)
        source = stored if read_so.beside is None else read_so.beside
        flat = source.reshape(-1, stored.shape[-1])[:rows]
        values = read_so.read(flat) if read_so.read is not None else weights.decoded(name, flat)
        return np.asarray(values.reshape(-1, some.got.shape[1])[:count])

    return read


def _rearranged(some: ForeignBlocks) -> Iterator[Way]:
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
        yield (
            Misreading("order-in-block", _order_in_words(some.kind, order)),
            lambda blocks: some.decoded(blocks)[:, order],
        )


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


def _unwritten(some: ForeignBlocks) -> Iterator[Way]:
    """A part of every block is left zero."""
    zero = (some.got == 0).all(axis=0) & (some.right != 0).any(axis=0)
    if zero.any():
        where = run_in_words(np.flatnonzero(zero), "value", len(zero))
        yield Misreading("not-written", f"leaves {where} of each {some.kind} block zero"), \
            lambda blocks: np.where(zero, 0, some.decoded(blocks))  # fmt: skip
