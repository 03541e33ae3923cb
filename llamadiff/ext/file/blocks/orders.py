"""Which bits of a block hold each element of a field, and blocks of which they are taken in another order."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.ext.file.blocks.fields import FIELDS, PACKED, field_of
from llamadiff.ext.file.blocks.misreading import Decode, Misread

Array = NDArray[Any]
Bits = NDArray[np.intp]  # [element, bit]: the places of an element's bits in the block, its lowest bit first


def bits_in_runs(first: int, size: int, bits: int, run: int, *, highest_first: bool = False) -> Bits:
    """Elements of so many bits in a block's bytes [first, first + size).

    A run of bytes has the lowest bits of all its bytes as its first elements, then the next bits of the same bytes; or
    the highest bits come first.
    """
    parts = 8 // bits
    group, rest = np.divmod(np.arange(size * parts), run * parts)
    part, byte = np.divmod(rest, run)
    part = parts - 1 - part if highest_first else part
    return np.asarray(8 * (first + group * run + byte)[:, None] + bits * part[:, None] + np.arange(bits))


def bits_in_a_row(first: int, count: int, bits: int, *, highest_first: bool = False) -> Bits:
    """Elements one after the other from a byte on, whatever bytes they straddle."""
    place = np.arange(count * bits).reshape(count, bits)
    if highest_first:
        place = (place // 8 * 8 + 7 - place % 8)[:, ::-1]
    return 8 * first + place


def bits_of(kind: str, name: str, run: int = 0, *, highest_first: bool = False) -> Bits:
    """The elements of a type's field, in its own order or in runs of so many bytes."""
    (first, last), (bits, own) = FIELDS[kind][name], PACKED[kind][name]
    return bits_in_runs(first, last - first, bits, run or own, highest_first=highest_first)


def order_of(own: Bits, other: Bits) -> Array:
    """Which elements of one order stand where those of another one do: [element]."""
    ascending = np.argsort(own[:, 0])
    return ascending[np.searchsorted(own[ascending, 0], other[:, 0])]


def rearranged(own: Bits, other: Bits) -> Misread:
    """Blocks of which each element is made of other bits than its own."""

    def read(blocks: Array, decode: Decode) -> Array:
        first, last = int(own.min()) // 8, int(own.max()) // 8 + 1
        source = np.arange(8 * blocks.shape[1])
        source[own] = other
        bits = np.unpackbits(blocks, axis=1, bitorder="little")
        out = blocks.copy()
        out[:, first:last] = np.packbits(bits.take(source[8 * first : 8 * last], axis=1), axis=1, bitorder="little")
        return decode(out)

    return read


def six_bit_scales(kind: str) -> Bits:
    """The six-bit scales of a block; behind them, of Q4_K and Q5_K, its minima (get_scale_min_k4): [element, 6]."""
    if kind == "IQ4_XS":
        return np.hstack([bits_of(kind, "scales_l"), bits_of(kind, "scales_h")])
    first = field_of(kind, "scales").start
    if kind == "Q3_K":
        return np.hstack([bits_in_runs(first, 8, 4, 8), bits_in_runs(first + 8, 4, 2, 4)])
    whole = 8 * (first + np.arange(12))[:, None] + np.arange(8)  # the bits of each byte
    early, late = (whole[:4], whole[4:8]), whole[8:]
    sides = ((early[0], late[:, :4]), (early[1], late[:, 4:]))  # scales, minima
    return np.concatenate([part for six, four in sides for part in (six[:, :6], np.hstack([four, six[:, 6:]]))])
