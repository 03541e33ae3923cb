"""A tensor's values in another order: which row, column or value went where, found by measuring, and in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.numerics import metrics

Array = NDArray[Any]
SOME = 1 << 20  # values that are widened at once
NOISY = 1e-6  # an NMSE beyond which rows are told by what they are like, not by what they are
MANY, LIKE, LEAST, SLAB = 1 << 14, 512, 8, 1024  # rows and columns that are looked at, rows at a time
FEW = 16  # rows whose order is told one by one
WINDOW, REACH = 4096, 1 << 17  # values that are looked for, and how far away


def order_of(values: Array, expected: Array, heads: int, limit: float) -> str | None:
    """How the rows, the columns or all values [row, column] are in another order than expected; None if they are not.

    ``heads``: of so many heads the rows should be (0: of none). ``limit``: the NMSE that the order may leave.
    """
    if expected.shape[1] == 1:
        order = _permutation(values, expected, limit)
        return None if order is None else order_in_words(order, "value")
    for word, a, b in (("row", values, expected), ("column", values.T, expected.T)):
        order = _permutation(a, b, limit)
        if order is not None:
            return order_in_words(order, word, heads if word == "row" else 0)
    shift = _shift(values.reshape(-1), expected.reshape(-1), limit)
    return None if shift is None else f"all values are {_steps(shift, 'place')} {'later' if shift > 0 else 'earlier'}"


def _permutation(values: Array, expected: Array, limit: float) -> Array | None:
    """The order with values[i] = expected[order[i]], if there is one."""
    ours, theirs = _signatures(values), _signatures(expected)
    a, b = np.argsort(ours, kind="stable"), np.argsort(theirs, kind="stable")
    if np.allclose(ours[a], theirs[b], rtol=1e-2, atol=1e-2 * float(np.abs(theirs).max(initial=0.0))):
        order = np.empty(len(a), np.int64)
        order[a] = b
        if _is_order(order, values, expected, limit):
            return order
    nearest = _nearest(values, expected) if limit > NOISY else None
    return nearest if nearest is not None and _is_order(nearest, values, expected, limit) else None


def _is_order(order: Array, values: Array, expected: Array, limit: float) -> bool:
    if (order == np.arange(len(order))).all():
        return False
    return metrics.nmse(values, np.ascontiguousarray(expected[order]), 0) <= limit


def _nearest(values: Array, expected: Array) -> Array | None:
    """For each row the one that it is most like, by some of their values; None if two are most like the same."""
    if len(values) > MANY or expected.shape[1] < LEAST:
        return None
    columns = np.random.default_rng(1).permutation(expected.shape[1])[:LIKE]
    a, b = (np.nan_to_num(np.asarray(side[:, columns], np.float32)) for side in (values, expected))
    b = b / np.maximum(np.linalg.norm(b, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    order = np.concatenate([(a[i : i + SLAB] @ b.T).argmax(axis=1) for i in range(0, len(a), SLAB)])
    return order if len(np.unique(order)) == len(order) else None


def _signatures(rows: Array) -> Array:
    """A number for each row that tells it from others: its product with random values."""
    towards, step = np.random.default_rng(0).standard_normal(rows.shape[1]), max(1, SOME // rows.shape[1])
    parts = [np.asarray(rows[i : i + step], np.float64) for i in range(0, len(rows), step)]
    return np.concatenate([(part * towards).sum(axis=1) for part in parts])


def _shift(values: Array, expected: Array, limit: float) -> int | None:
    """By how many places values are rolled; a part in the middle is looked for near its place."""
    size = min(WINDOW, values.size // 4)
    if not size:
        return None
    start = (values.size - size) // 2
    first = max(0, start - REACH)
    around = np.asarray(expected[first : start + size + REACH], np.float64)
    part = np.asarray(values[start : start + size], np.float64)
    length = len(around) + size
    like = np.fft.irfft(np.fft.rfft(around, length) * np.conj(np.fft.rfft(part, length)), length)
    shift = start - (first + int(like[: len(around) - size + 1].argmax()))
    return shift if shift and metrics.nmse(values[None], np.roll(expected, shift)[None], 0) <= limit else None


def order_in_words(order: Array, word: str, heads: int = 0) -> str:
    """An order in words: ``word`` number i has the values that number ``order[i]`` should have; of so many heads."""
    return next(_names(order, word, heads), None) or _unnamed(order, word)


def _unnamed(order: Array, word: str) -> str:
    """Of an order without a name, the first that moved, and where to."""
    first = int(np.argmax(order != np.arange(len(order))))
    one = word.partition(" ")[0]
    return f"the {_plural(word)} are in another order: {one} {first} should be {one} {int(order[first])}"


def _names(order: Array, word: str, heads: int) -> Iterator[str]:
    """What an order is called, the simplest first."""
    yield from _simple(order, word)
    yield from _halved(order, word, heads)
    for size in _divisors(len(order)):  # blocks of rows, the largest first
        blocks = order.reshape(-1, size)
        if (blocks - blocks[:, :1] == np.arange(size)).all() and not (blocks[:, 0] % size).any():
            of = f"block of {size} {word}s" if len(order) != heads * size else f"head of {size} {word}s"
            coarse = blocks[:, 0] // size
            yield next(_simple(coarse, of), _unnamed(coarse, of))
            return
    for size in reversed(_divisors(len(order))):  # the same within all blocks, the smallest first
        if size <= FEW and (order.reshape(-1, size) - order[:size] == np.arange(0, len(order), size)[:, None]).all():
            yield f"of every {size} {word}s the order is another: {', '.join(map(str, order[:size]))}"
            return
    for size in _divisors(len(order)):
        if (order == np.arange(len(order)).reshape(size, -1).T.reshape(-1)).all():
            rest = len(order) // size
            yield f"the {word}s are regrouped: [{size}, {rest}] is written as [{rest}, {size}]"
            return


def _simple(order: Array, word: str) -> Iterator[str]:
    """Rolled, reversed, two swapped."""
    count, here = len(order), np.arange(len(order))
    moved = np.flatnonzero(order != here)
    if len(moved) == 2:
        yield f"{_plural(word)} {moved[0]} and {moved[1]} are swapped"
    shift = int(-order[0]) % count
    if (order == (here - shift) % count).all():
        shift -= count if shift > count // 2 else 0
        yield f"the {_plural(word)} are rolled: each is {_steps(shift, 'place')} {'later' if shift > 0 else 'earlier'}"
    if (order == here[::-1]).all():
        yield f"the {_plural(word)} are in reverse order"


def _halved(order: Array, word: str, heads: int) -> Iterator[str]:
    """Pairs of each head made halves, or halves made pairs, by the right number of heads or by another."""
    every = [heads, *(count for count in _divisors(len(order)) if count != heads)] if heads else []
    for count in every:
        size, rest = divmod(len(order), count)
        if rest or size % 2 or size < 4:
            continue
        here = np.arange(len(order))
        halves = here.reshape(count, size // 2, 2).swapaxes(1, 2).reshape(-1)
        pairs = here.reshape(count, 2, size // 2).swapaxes(1, 2).reshape(-1)
        wrong = "" if count == heads else f", by {count} heads of {size} where the model has {heads}"
        half = size // 2
        if (order == halves).all():
            yield f"each head's {word}s are in halves (i, i+{half}) where pairs (2i, 2i+1) are right{wrong}"
        elif (order == pairs).all():
            yield f"each head's {word}s are in pairs (2i, 2i+1) where halves (i, i+{half}) are right{wrong}"


def _divisors(count: int) -> list[int]:
    """Those that are neither one nor all, the largest first."""
    small = [size for size in range(2, int(count**0.5) + 1) if count % size == 0]
    return sorted({*small, *(count // size for size in small)}, reverse=True)


def _plural(word: str) -> str:
    first, _, rest = word.partition(" ")
    return f"{first}s {rest}".rstrip()


def _steps(shift: int, word: str) -> str:
    return f"{abs(shift)} {word}{'s' if abs(shift) != 1 else ''}"
