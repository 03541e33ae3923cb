"""Quants of blocks, and how people misread them: nibbles, high bits, offsets.

A misreading is written as what it does to a block's bytes before they are decoded, or to the values after.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.ext.file.blocks.fields import FIELDS, changed, field_of, half_at
from llamadiff.ext.file.blocks.misreading import (
    Change,
    Decode,
    Misread,
    Misreading,
    all_set,
    block_bug,
    first_half_twice,
    halves_swapped,
    parts_reversed,
    with_field,
    with_nibbles_swapped,
    zero,
)

Array = NDArray[Any]
LEGACY = ("Q4_0", "Q4_1", "Q5_0", "Q5_1")
WITH_HIGH_BITS = ("Q5_0", "Q5_1", "Q3_K", "Q5_K", "Q6_K")


@block_bug(
    fix="low nibbles are the first half of the (sub-)block, high nibbles the second",
    source="imp#567, aprender#1621",
)
def nibbles_interleaved(kind: str, _: int) -> Iterator[Misreading]:
    """A byte's two nibbles are taken for neighbouring values."""
    if kind not in (*LEGACY, "Q4_K", "Q5_K"):
        return
    says = f"takes a {kind} byte's two nibbles for neighbours"
    yield Misreading(says, _interleaved(kind))
    if kind in WITH_HIGH_BITS:
        low = with_field(kind, "qs", _neighbours(16 if kind in LEGACY else 32))
        yield Misreading(f"{says}, but not their high bits", low, "low")


def _interleaved(kind: str) -> Misread:
    """Byte j's nibbles, with their high bits, as values 2j and 2j + 1; ggml keeps them half a (sub-)block apart."""
    if kind in LEGACY:  # one scale for all: the values move as their quants do
        order = np.arange(32).reshape(2, 16).T.reshape(-1)
        return lambda blocks, decode: decode(blocks)[:, order]
    low = with_field(kind, "qs", _neighbours(32))
    if kind == "Q4_K":
        return low
    high = with_field(kind, "qh", _high_neighbours)
    return lambda blocks, decode: high(blocks, lambda moved: low(moved, decode))


def _neighbours(half: int) -> Change:
    """Bytes of nibbles as they would have to be for ggml's order to give what neighbours give."""

    def change(qs: Array) -> Array:
        values = np.stack([qs & 15, qs >> 4], axis=-1).reshape(len(qs), -1, 2, half)
        return np.asarray(values[:, :, 0] | values[:, :, 1] << 4).reshape(qs.shape)

    return change


def _high_neighbours(qh: Array) -> Array:
    """The same for Q5_K's high bits: bit i of byte j is that of value j in sub-block i."""
    bits = np.unpackbits(qh[..., None], axis=2, bitorder="little").swapaxes(1, 2)  # [n, sub-block, value]
    moved = bits.reshape(len(qh), 4, 2, 32).swapaxes(2, 3).reshape(len(qh), 8, 32)
    return np.packbits(moved.swapaxes(1, 2), axis=2, bitorder="little")[..., 0]


@block_bug(fix="the low nibble comes first", source="imp#567, aprender#1621")
def nibbles_swapped(kind: str, _: int) -> Iterator[Misreading]:
    """High and low nibbles are swapped."""
    if kind in (*LEGACY, "Q4_K", "Q5_K", "Q6_K"):
        yield Misreading(f"swaps the high and low nibbles of {kind}", with_field(kind, "qs", with_nibbles_swapped))


@block_bug(fix="subtract the type's offset from the quants (8, 16, 32) before they are scaled")
def quants_offset(kind: str, _: int) -> Iterator[Misreading]:
    """The quants' offset is not subtracted, or signs are misread."""
    offset = {"Q4_0": 8, "Q5_0": 16, "Q6_K": 32, "Q3_K": 4}.get(kind)
    if offset is not None:
        says = f"does not subtract {offset} from {kind}'s quants"
        fix = f"subtract {offset} from {kind}'s quants before they are scaled"
        yield Misreading(says, lambda b, decode: decode(b) - _zero_quants(kind, b, decode), "offset", fix=fix)
    if kind == "Q4_0":
        says = "takes Q4_0's nibbles for two's complement; they count from -8"
        fix = "read nibbles as 0 to 15, and subtract 8"
        yield Misreading(says, with_field(kind, "qs", lambda qs: qs ^ 0x88), "signed", fix=fix)
    if kind == "Q8_0":

        def unsigned(blocks: Array, decode: Decode) -> Array:
            negative = blocks[:, field_of("Q8_0", "qs")] >= 128
            return decode(blocks) + np.float32(256) * negative * half_at(blocks, field_of("Q8_0", "d"))

        fix = "read Q8_0's quants as signed bytes"
        yield Misreading("reads Q8_0's quants as unsigned bytes", unsigned, "unsigned", fix=fix)


def _zero_quants(kind: str, blocks: Array, decode: Decode) -> Array:
    """What a block decodes to when its stored quants are zero: the offset times the scales."""
    zeroed = changed(blocks, field_of(kind, "qs"), 0)
    return decode(changed(zeroed, field_of(kind, "qh"), 0) if "qh" in FIELDS[kind] else zeroed)


@block_bug(fix="add the high bits from qh (hmask) to the low ones", source="aprender#199, mlx#3664")
def high_bits_ignored(kind: str, _: int) -> Iterator[Misreading]:
    """The quants' high bits are ignored, taken for all set, or inverted."""
    if kind in WITH_HIGH_BITS:
        what = f"the high bits of {kind}'s quants"
        yield Misreading(f"ignores {what}", with_field(kind, "qh", zero), "ignores")
        yield Misreading(f"takes for all set {what}", with_field(kind, "qh", all_set), "takes for all set")
        yield Misreading(f"inverts {what}", with_field(kind, "qh", np.invert), "not")


@block_bug(
    fix="take each value's high bits from its own place in qh, which differs by type",
    source="aprender#199, mlx#3664",
)
def high_bits_misplaced(kind: str, _: int) -> Iterator[Misreading]:
    """The quants' high bits go to the wrong values."""
    fix = "byte j of qh has bit i of value 32 * i + j"
    if kind in ("Q5_0", "Q5_1"):
        fix = "bit j of qh belongs to value j of the low half, bit j + 16 to the high half"
        changes: dict[str, Change] = {
            "takes the first 16 high bits for both halves": first_half_twice,
            "swaps the high bits of the two halves": halves_swapped,
            "takes high bits two by two": _two_by_two,
        }
    elif kind in WITH_HIGH_BITS:
        fix = "byte j of qh has the bits 2 i and 2 i + 1 of value 32 * i + j" if kind == "Q6_K" else fix
        changes = {
            "swaps the two halves of the high bits": halves_swapped,
            "reads the high bits from the other end of the byte": parts_reversed(2 if kind == "Q6_K" else 1),
        }
    else:
        return
    for says, change in changes.items():
        yield Misreading(f"{says} ({kind})", with_field(kind, "qh", change), says, fix=fix)


def _two_by_two(qh: Array) -> Array:
    """Value j of the two halves takes bits 2j and 2j + 1."""
    bits = np.unpackbits(qh, axis=1, bitorder="little").reshape(-1, 16, 2).swapaxes(1, 2)
    return np.packbits(bits.reshape(-1, 32), axis=1, bitorder="little")


@block_bug(fix="values of one K-quant byte are 32 (Q6_K: also 64) apart in the block, not neighbours")
def quants_linear(kind: str, _: int) -> Iterator[Misreading]:
    """The two-bit fields of a byte (Q2_K, Q3_K) are taken for neighbouring values."""
    if kind in ("Q2_K", "Q3_K"):
        yield Misreading(f"takes the four values of a {kind} byte for neighbours", with_field(kind, "qs", _strided))


def _strided(qs: Array) -> Array:
    """Bytes as they would have to be for ggml's order to give what neighbours give."""
    two_bits = (qs[..., None] >> np.array([0, 2, 4, 6], np.uint8)) & 3
    parts = two_bits.reshape(-1, 2, 4, 32)
    return (parts[:, :, 0] | parts[:, :, 1] << 2 | parts[:, :, 2] << 4 | parts[:, :, 3] << 6).reshape(-1, 64)
