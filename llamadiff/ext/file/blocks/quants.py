"""Quants of blocks, and how people misread them: orders, high bits, offsets.

A misreading is written as what it does to a block's bytes before they are decoded, or to the values after.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.ext.file.blocks.fields import FIELDS, PACKED, changed, field_of, half_at
from llamadiff.ext.file.blocks.misreading import Decode, Misread, Misreading, all_set, block_bug, with_field, zero
from llamadiff.ext.file.blocks.orders import Bits, bits_of, order_of, rearranged

Array = NDArray[Any]
WITH_HIGH_BITS = ("Q5_0", "Q5_1", "Q3_K", "Q5_K", "Q6_K")
RUNS = (1, 4, 8, 16, 32, 64, 128)  # bytes whose lowest parts engines take before the next ones


def other_orders(kind: str) -> Iterator[Misreading]:
    """A type's quants in every other order: their high bits with them, or not, or in the order of qh."""
    if "qs" not in PACKED.get(kind, {}):
        return
    own, size, fix = PACKED[kind]["qs"][1], field_of(kind, "qs").stop - field_of(kind, "qs").start, _packing(kind)
    right = np.hstack([bits_of(kind, name) for name in ("qs", "qh") if name in PACKED[kind]])
    runs = [run for run in RUNS if run <= size and (run != 8 or own <= 16)]  # words of 8 bytes: of short runs alone
    orders = [(run, backwards) for run in runs for backwards in (False, True) if backwards or run != own]
    for run, backwards in orders:
        cause, says = _called(kind, run, backwards)
        for of_high, variant, bits in _with_high_bits(kind, run, backwards):
            yield Misreading(says + of_high, rearranged(right, bits), f"{run} {backwards} {variant}", cause, fix)
    if kind.endswith("_K"):  # a scale for each part of a byte, or for several
        cause, says = _called(kind, 1, backwards=False)
        moved = order_of(bits_of(kind, "qs"), bits_of(kind, "qs", 1))
        yield Misreading(f"{says}, though with the scales of their right places", _moved(moved), "values", cause, fix)


def _called(kind: str, run: int, backwards: bool) -> tuple[str, str]:
    """The bug's name, and what it does: a byte's parts are values so many apart, or come from its highest bits down."""
    bits, own = PACKED[kind]["qs"]
    a_byte = f"{'an' if kind[0] in 'IMN' else 'a'} {kind} byte"
    parts = f"{a_byte}'s two nibbles" if bits == 4 else f"the {8 // bits} values of {a_byte}"
    if run == own and bits == 4:
        return "nibbles-swapped", f"swaps the high and low nibbles of {kind}"
    if run == own:
        return "quants-order", f"takes {parts} from its highest bits down"
    end = ", the highest bits first" if backwards else ""
    if run > 1:
        return "quants-order", f"takes {parts} for values {run} apart{end}; {_packed_as(own)}"
    return ("nibbles-interleaved" if bits == 4 else "quants-linear"), f"takes {parts} for neighbours{end}"


def _packed_as(run: int) -> str:
    return "they are neighbours" if run == 1 else f"they are {run} apart"


def _with_high_bits(kind: str, run: int, backwards: bool) -> Iterator[tuple[str, str, Bits]]:
    """Quants in runs of so many bytes, with each order of their high bits: in words, a variant, all bits."""
    low = bits_of(kind, "qs", run, highest_first=backwards)
    if "qh" not in PACKED[kind]:
        yield "", "", low
        return
    high = bits_of(kind, "qh")
    yield "", "", np.hstack([low, high[order_of(bits_of(kind, "qs"), low)]])
    if run in (1, PACKED[kind]["qs"][1]) or not backwards:
        yield ", but not their high bits", "low", np.hstack([low, high])
    if run == 1 < PACKED[kind]["qh"][1]:
        of_qh = bits_of(kind, "qh", 1, highest_first=backwards)
        yield ", and the bits of a byte of qh too", "both", np.hstack([low, of_qh])


def _moved(order: Array) -> Misread:
    """Values that are right, and written elsewhere."""
    return lambda blocks, decode: decode(blocks)[:, order]


def _packing(kind: str) -> str:
    """How a type's quants lie in its bytes: what to do."""
    bits, own = PACKED[kind]["qs"]
    places = [f"j + {own * part}" if part else "j" for part in range(8 // bits)]
    if own == 1:
        return f"byte j of {kind}'s qs has eight values from 8 * j on, the first in the lowest bit"
    first = "the low nibble" if bits == 4 else "the lowest bits"
    right = f"of each {own} bytes of {kind}'s qs, byte j has values {', '.join(places[:-1])} and {places[-1]}"
    right = f"{right} of {own * len(places)}, from {first} up"
    return f"{right}; {HIGH_BITS[PACKED[kind]['qh']]}" if "qh" in PACKED[kind] else right


HIGH_BITS = {  # by how they are packed
    (1, 1): "bit j of qh belongs to value j of the low half, bit j + 16 to the high half",
    (1, 32): "bit i of byte j of qh belongs to value 32 * i + j",
    (2, 32): "of each 32 bytes of qh, bits 2 i and 2 i + 1 of byte j belong to value 32 * i + j of 128",
}


@block_bug(
    fix="low nibbles are the first half of the (sub-)block, high nibbles the second",
    source="imp#567, aprender#1621",
)
def nibbles_interleaved(kind: str, _: int) -> Iterator[Misreading]:
    """A byte's two nibbles are taken for neighbouring values."""
    return (each for each in other_orders(kind) if each.cause == "nibbles-interleaved")


@block_bug(fix="the low nibble comes first", source="imp#567, aprender#1621")
def nibbles_swapped(kind: str, _: int) -> Iterator[Misreading]:
    """High and low nibbles are swapped."""
    return (each for each in other_orders(kind) if each.cause == "nibbles-swapped")


@block_bug(fix="values of one K-quant byte are 32 (Q6_K: also 64) apart in the block, not neighbours")
def quants_linear(kind: str, _: int) -> Iterator[Misreading]:
    """The two-bit fields of a byte (Q2_K, Q3_K, TQ2_0) are taken for neighbouring values."""
    return (each for each in other_orders(kind) if each.cause == "quants-linear")


@block_bug(fix="take the values of a byte as far apart as the type has them, the first from the lowest bits")
def quants_order(kind: str, _: int) -> Iterator[Misreading]:
    """The values of a byte are taken for others, nearer or farther apart in the block, or from its other end."""
    return (each for each in other_orders(kind) if each.cause == "quants-order")


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
    if "qh" in PACKED.get(kind, {}):
        own, fix = bits_of(kind, "qh"), HIGH_BITS[PACKED[kind]["qh"]]
        for says, other in _high_bits_elsewhere(kind, own):
            yield Misreading(f"{says} ({kind})", rearranged(own, other), says, fix=fix)


def _high_bits_elsewhere(kind: str, own: Bits) -> Iterator[tuple[str, Bits]]:
    """The places where engines look for high bits."""
    run, first, here = PACKED[kind]["qh"][1], own.min(), np.arange(len(own))
    if run == 1:
        yield "takes the first 16 high bits for both halves", own[here % 16]
        yield "takes high bits two by two", own[2 * (here % 16) + here // 16]
    yield "swaps the two halves of the high bits", first + (own - first + own.size // 2) % own.size
    yield "reads the high bits from the other end of the byte", bits_of(kind, "qh", run, highest_first=True)
    says = "takes the high bits of one byte for those of"
    for other in (other for other in (16, 64) if other != run and 8 * other <= own.size):
        yield f"{says} values {other} apart", bits_of(kind, "qh", other)
    if run > 1:
        yield f"{says} neighbours", bits_of(kind, "qh", 1)
        yield f"{says} neighbours, the highest first", bits_of(kind, "qh", 1, highest_first=True)
