"""Values that a case's sources get: like those of a run, zero, small, large, in an order that shows, at the ends."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from llamaref.weights import block_sizes
from numpy.typing import NDArray

from llamadiff.ext.graph.op import Op, Operand
from llamadiff.ext.replay.axes import is_blocks
from llamadiff.numerics.arithmetic import round_to

Array = NDArray[Any]
Dice = np.random.Generator
Shape = tuple[int, ...]

RANDOM = "random values"
MASKS = {"SOFT_MAX": 1, "FLASH_ATTN_EXT": 3}  # the source that is added to scores
_WEIGHTS = ("MUL_MAT", "MUL_MAT_ID")  # their first source is one; others' is what they compute on
# A source of whole numbers: the source that they count places of, and along which of its axes.
_PLACES = {"GET_ROWS": (1, 0, -2), "SET_ROWS": (1, 2, -2), "MUL_MAT_ID": (2, 0, -3), "ADD_ID": (2, 1, -2)}
_POSITIONS = ("ROPE", "ROPE_BACK")
LATE = 4000  # a position beyond all of a short prompt


def _random(dice: Dice, shape: Shape) -> Array:
    return dice.standard_normal(shape)


def _ramp(dice: Dice, shape: Shape) -> Array:
    """Values that grow along every axis, along each by other steps: a swapped axis or a transposed index shows."""
    steps = zip(np.indices(shape, sparse=True), shape, (0.11, 0.23, 0.37, 0.71), strict=True)
    return np.asarray(sum(part * (at / max(1, size - 1) - 0.4) for at, size, part in steps)) * 2


def _outlier(dice: Dice, shape: Shape) -> Array:
    """One value of each row a thousand times as large."""
    x = dice.standard_normal(shape)
    place = dice.integers(shape[-1], size=(*shape[:-1], 1))
    np.put_along_axis(x, place, 1000 * np.take_along_axis(x, place, axis=-1), axis=-1)
    return x


def _equal(dice: Dice, shape: Shape) -> Array:
    return np.broadcast_to(dice.standard_normal((*shape[:-1], 1)), shape)


@dataclass(frozen=True)
class Values:
    """What a case's values are called, and what makes them: the ``data`` that an op computes on, in its own ``size`` or
    that of the run's; masks, places and positions by name.
    """

    name: str
    data: Callable[[Dice, Shape], Array] = _random
    size: float | None = None
    mask: str = "causal"
    places: str = "any"
    positions: str = "in a row"


USUAL = Values(RANDOM)
OTHERS = (
    Values("other random values"),
    Values("zeros", lambda dice, shape: np.zeros(shape), 1.0),
    Values("small values", size=1e-3),
    Values("large values", size=300.0),
    Values("one large value in each row", _outlier, 1.0),
    Values("values that grow along every axis", _ramp, 1.0),
    Values("equal values in each row", _equal, 1.0),
    Values("values far from zero", lambda dice, shape: 10 + dice.standard_normal(shape), 1.0),
)
BY_SOURCE = {
    "mask": (
        Values("a mask that hides nothing", mask="open"), Values("a mask that hides keys at random", mask="holes"),
        Values("a mask with biases of -150", mask="biases"),
    ),
    "places": (
        Values("the last place alone", places="last"), Values("the first place alone", places="first"),
        Values("places from the last to the first", places="down"),
    ),
    "positions": (
        Values("positions from 4000 on", positions="late"), Values("positions in any order", positions="mixed"),
        Values("equal positions", positions="equal"),
    ),
}  # fmt: skip


def values_of(n: Op) -> tuple[Values, ...]:
    """The kinds of values that an op's cases have beside the usual ones."""
    asked = {"mask": n.name in MASKS and n.optional(MASKS[n.name]) is not None, "places": n.name in _PLACES,
             "positions": n.name in _POSITIONS}  # fmt: skip
    return (*OTHERS, *(each for word, is_there in asked.items() if is_there for each in BY_SOURCE[word]))


def sources_of(
    stored: Op, n: Op, shapes: list[Shape | None], kind: Values, dice: Dice
) -> tuple[Operand | None, ...] | None:
    """Sources of these shapes, as a file keeps them; None where an op has no such case. ``n`` is the op, decoded."""
    made: list[Operand | None] = []
    for place, (old, floats, shape) in enumerate(zip(stored.sources, n.sources, shapes, strict=False)):
        if old is None or floats is None or shape is None:
            made.append(None)
            continue
        values = _source(n, place, old, floats.values, shape, shapes, kind, dice)
        if values is None:
            return None
        made.append(Operand(values, old.kind, old.name))
    return tuple(made)


def _source(
    n: Op, place: int, old: Operand, floats: Array, shape: Shape, shapes: list[Shape | None], kind: Values, dice: Dice
) -> Array | None:
    if floats.dtype.kind in "iu":
        whole = _whole(n, place, floats, shape, shapes, kind, dice)
        return None if whole is None else whole.astype(floats.dtype)
    if n.name in _POSITIONS and place == 2:  # frequency factors
        return floats if shape == floats.shape else None
    if is_blocks(old.kind):
        return _shuffled_blocks(old, floats, shape, dice)
    if place == MASKS.get(n.name):
        scores = shapes[0] or shape
        return _as_stored(_mask(floats, shape, scores[-2], kind.mask, dice), old)
    if place != int(n.name in _WEIGHTS):  # not what the op computes on
        return _as_stored(_like(floats, None, _random(dice, shape)), old)
    return _as_stored(_like(floats, kind.size, kind.data(dice, shape)), old)


def _like(old: Array, size: float | None, x: Array) -> Array:
    """Values of a size, or of that of the old ones; none below zero where those have none."""
    seen = old[np.isfinite(old)]
    own = float(np.sqrt(np.mean(np.square(seen, dtype=np.float64)))) if seen.size else 1.0
    x = x * ((own or 1.0) if size is None else size)
    return np.abs(x) if seen.size and seen.min() >= 0 and seen.any() else x


def _as_stored(x: Array, old: Operand) -> Array:
    """Values as a file keeps those of a type: rounded to it, in bytes where the old ones are."""
    x = round_to(np.asarray(x, np.float32), old.kind.upper())
    if old.values.dtype == np.uint8:  # bfloat16 of the model's file
        return (np.ascontiguousarray(x).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return x.astype(old.values.dtype)


def _shuffled_blocks(old: Operand, floats: Array, shape: Shape, dice: Dice) -> Array:
    """Rows of the blocks that the old ones are made of, drawn anew."""
    per_block, size = block_sizes(old.kind)
    is_stored = old.values.dtype == np.uint8
    blocks = (old.values if is_stored else floats).reshape(-1, size if is_stored else per_block)
    drawn = blocks[dice.integers(len(blocks), size=math.prod(shape) // per_block)]
    return drawn.reshape(*shape[:-1], -1)


def _mask(old: Array, shape: Shape, queries: int, kind: str, dice: Dice) -> Array:
    """What is added to scores [.., query, key]: the last query sees all, and each sees its first key."""
    keys, rows = shape[-1], np.arange(shape[-2])[:, None]
    seen = np.arange(keys)[None, :] <= np.maximum(rows + keys - queries, 0)
    if kind in ("open", "biases"):
        seen = np.ones_like(seen)
    if kind == "holes":
        seen = dice.random(shape[-2:]) < 0.7
        seen[:, 0] = seen[queries - 1] = True
    bias = dice.uniform(-152, -150, shape) if kind == "biases" or _has_biases(old) else np.zeros(shape)
    return np.where(seen, bias, -np.inf)


def _has_biases(mask: Array) -> bool:
    return bool((np.isfinite(mask) & (mask != 0)).any())


def _whole(
    n: Op, place: int, old: Array, shape: Shape, shapes: list[Shape | None], kind: Values, dice: Dice
) -> Array | None:
    if n.name in _POSITIONS:
        return _positions(shape, kind.positions, dice)
    if n.name not in _PLACES or _PLACES[n.name][0] != place:
        return old if shape == old.shape else dice.integers(0, max(1, int(old.max(initial=1))), size=shape)
    counted = shapes[_PLACES[n.name][1]]
    assert counted is not None
    return _places(n, shape, counted[_PLACES[n.name][2]], kind.places, dice)


def _positions(shape: Shape, kind: str, dice: Dice) -> Array:
    count = math.prod(shape)
    if kind == "equal":
        return np.full(shape, 7)
    positions = np.arange(count) + (LATE if kind == "late" else 0)
    return (dice.permutation(3 * count)[:count] if kind == "mixed" else positions).reshape(shape)


def _places(n: Op, shape: Shape, count: int, kind: str, dice: Dice) -> Array | None:
    """Numbers of rows; those that are written, or chosen by one token, are different ones."""
    once = n.name in ("SET_ROWS", "MUL_MAT_ID")
    if not once:
        ends = {"last": np.full(shape, count - 1), "first": np.zeros(shape, int),
                "down": (count - 1 - np.arange(math.prod(shape)) % count).reshape(shape)}  # fmt: skip
        return ends[kind] if kind in ends else _with_last(dice.integers(count, size=shape), count)
    if shape[-1] > count:
        return None
    first = {"last": count - shape[-1], "first": 0}.get(kind)
    rows = [dice.permutation(count)[: shape[-1]] if first is None else first + np.arange(shape[-1])
            for _ in range(math.prod(shape[:-1]))]  # fmt: skip
    every = np.stack(rows).reshape(shape)
    return every[..., ::-1] if kind == "down" and first is not None else every


def _with_last(places: Array, count: int) -> Array:
    """One of them is the last."""
    places[..., -1] = count - 1
    return places
