"""In what order channels were found, in words: rolled, heads or blocks exchanged, axes swapped, pairs and halves."""

from __future__ import annotations

from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.deviation import listed

Array = NDArray[Any]

LEAST_BLOCK = 8  # channels that move together


def order_in_words(source: Array, dim: int | None) -> str:
    """What an order of channels is: ``source[i]`` is the right channel whose values channel i has; ``dim`` a head's."""
    n = len(source)
    rolled = int((0 - source[0]) % n)
    if np.array_equal(source, (np.arange(n) - rolled) % n):
        by = rolled if rolled <= n // 2 else rolled - n
        return f"every token's channels are rolled by {by}"
    if np.array_equal(source, np.arange(n)[::-1]):
        return "every token's channels are in reverse order"
    swapped = _swapped(source)
    if swapped is not None:
        return f"every token's channels are those of [{swapped}, {n // swapped}] written as [{n // swapped}, {swapped}]"
    return _within(source, dim) or _blocks(source, dim) or _listing(source)


def _swapped(source: Array) -> int | None:
    """The first of two axes that were swapped; None if that is not it. Pairs and halves have words of their own."""
    n = len(source)
    step = int(source[1] - source[0])
    if step <= 2 or n % step or n // step <= 2:
        return None
    return n // step if np.array_equal(source, np.arange(n).reshape(-1, step).T.ravel()) else None


def _within(source: Array, dim: int | None) -> str | None:
    """Pairs (2i, 2i+1) taken for halves (i, i + n/2), or the other way about, in each head."""
    n = len(source)
    for size in [dim] if dim else [n >> k for k in range(n.bit_length()) if n % (1 << k) == 0 and n >> k >= 4]:
        heads = np.arange(n).reshape(-1, size)
        halves = heads.reshape(len(heads), -1, 2).swapaxes(1, 2).ravel()
        pairs = heads.reshape(len(heads), 2, -1).swapaxes(1, 2).ravel()
        if np.array_equal(source, halves):
            return f"in every {size} channels even ones come first, then odd ones"
        if np.array_equal(source, pairs):
            return f"in every {size} channels those of both halves take turns"
    return None


def _blocks(source: Array, dim: int | None) -> str | None:
    """Blocks of channels that moved together."""
    starts = np.flatnonzero(np.diff(source) != 1) + 1
    block = gcd(len(source), *(int(i) for i in starts), *(int(i) for i in source[np.r_[0, starts]]))
    if block < LEAST_BLOCK:
        return None
    order = [int(i) // block for i in source[::block]]
    return f"{'heads' if block == dim else f'blocks of {block} channels'} are in the order {listed(order)}"


def _listing(source: Array) -> str:
    moved = np.flatnonzero(source != np.arange(len(source)))
    return listed([f"channel {i} has the values of channel {source[i]}" for i in moved])
