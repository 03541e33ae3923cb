"""Scales, minima and places of quantized blocks, and how people misread them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from llamaref.weights import block_sizes
from numpy.typing import NDArray

from llamadiff.ext.file.blocks.fields import FIELDS, changed, field_of
from llamadiff.ext.file.blocks.misreading import (
    Change,
    Decode,
    Misread,
    Misreading,
    block_bug,
    every_second_twice,
    with_field,
    zero,
)
from llamadiff.ext.file.blocks.orders import Bits, bits_in_a_row, bits_in_runs, bits_of, rearranged, six_bit_scales

Array = NDArray[Any]
WITH_MINIMA = ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K")
# Whole numbers times scales, of which engines' own decoders are misread; the others' quants are numbers of codes.
WHOLE_NUMBERS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


@block_bug(fix="subtract the (sub-)block's minimum (Q4_1 and Q5_1: add it)", source="aprender#199, mlx#3664")
def minima_wrong(kind: str, _: int) -> Iterator[Misreading]:
    """The blocks' minima are ignored, have the wrong sign, or change places with the scales."""
    if kind not in WITH_MINIMA:
        return
    m, d = field_of(kind, "m"), field_of(kind, "d")
    does, needs = ("adds", "subtract") if kind.endswith("K") else ("subtracts", "add")
    flip, fix = np.array([0, 0x80], np.uint8), f"{needs} {kind}'s minima"
    yield Misreading(f"ignores {kind}'s minima", with_field(kind, "m", zero), "none", fix=fix)
    negative = with_field(kind, "m", lambda field: field ^ flip)
    yield Misreading(f"{does} {kind}'s minima instead of the opposite", negative, "sign", fix=fix)
    swapped: Misread = lambda b, decode: decode(changed(changed(b, m, b[:, d]), d, b[:, m]))  # noqa: E731
    fix = "the scale d comes first, the minimum after it"
    yield Misreading(f"swaps {kind}'s scale and minimum", swapped, "swapped", fix=fix)


SIX_BITS = (
    "unpack six-bit scales and minima, one of each for 32 values, as ggml's get_scale_min_k4 does: four in the low "
    "bits of bytes 0 to 3 (minima: 4 to 7), four in the low nibbles of bytes 8 to 11 (minima: the high ones) with the "
    "upper two bits of the first"
)
RIGHT_SCALES = {
    "Q4_K": SIX_BITS, "Q5_K": SIX_BITS, "Q6_K": "read scales as signed bytes, one for 16 values",
    "Q2_K": "take a scale from each low nibble, a minimum from the high one: both are of 16 values",
    "Q3_K": "unpack six-bit scales, four low bits from bytes 0 to 7, two high bits from bytes 8 to 11, and subtract 32",
    "IQ4_XS": "unpack six-bit scales, four low bits from scales_l, two high bits from scales_h, and subtract 32",
}  # fmt: skip


@block_bug(fix="unpack the scales as ggml's dequantize_row of the type does", source="aprender#199, mlx#3664")
def scales_misread(kind: str, _: int) -> Iterator[Misreading]:
    """The K-quants' packed scales are unpacked wrongly: upper bits, order, sign, offset."""
    fix = RIGHT_SCALES.get(kind, "")
    for says, own, other in SCALE_ORDERS[kind](kind) if kind in SCALE_ORDERS else ():
        yield Misreading(f"{says} ({kind})", rearranged(own, other), says, fix=fix)
    if kind in ("Q3_K", "Q4_K", "Q5_K"):
        what = "scales" if kind == "Q3_K" else "last four scales and minima"
        says = f"leaves out the upper bits of the {what}"
        yield Misreading(f"{says} ({kind})", with_field(kind, "scales", UPPER_BITS_ZERO[kind]), says, fix=fix)
    if kind == "Q6_K":
        shared = with_field(kind, "scales", every_second_twice)
        yield Misreading(f"{SHARED}: blocks of 32 for 16 (Q6_K)", shared, "shared", fix=fix)
        yield Misreading("reads Q6_K's scales as unsigned bytes", _unsigned, "unsigned", fix=fix)
    if kind == "Q3_K":
        yield Misreading("does not subtract 32 from Q3_K's scales", _biased, "offset", fix=fix)


SHARED = "gives two neighbouring sub-blocks one scale"
UPPER_BITS_ZERO: Mapping[str, Change] = {
    "Q3_K": lambda s: np.concatenate([s[:, :8], zero(s[:, 8:])], axis=1),
    "Q4_K": lambda s: np.concatenate([s[:, :8] & 63, s[:, 8:]], axis=1),
    "Q5_K": lambda s: np.concatenate([s[:, :8] & 63, s[:, 8:]], axis=1),
}
Elsewhere = Iterator[tuple[str, Bits, Bits]]  # in words, where packed scales lie, where they are looked for


def _with_minima(kind: str) -> Elsewhere:
    """Eight six-bit scales and eight minima: Q4_K's and Q5_K's."""
    own, late = six_bit_scales(kind), [*range(4, 8), *range(12, 16)]
    yield "swaps scales and minima of the sub-blocks", own, np.roll(own, 8, axis=0)
    swapped = np.hstack([own[np.roll(late, 4), :4], own[late, 4:]])
    yield "swaps the nibbles of the last four scales and minima", own[late], swapped
    yield f"{SHARED}: blocks of 64 for 32", own, own[np.arange(16) // 2 * 2]
    for row, end in _in_a_row(own):
        yield f"takes six-bit scales, then minima, one after the other{end}", own, row
        pairs = row.reshape(8, 2, 6).swapaxes(0, 1).reshape(16, 6)
        yield f"takes scale and minimum of each sub-block one after the other{end}", own, pairs
    first = int(own.min()) // 8
    as_q3_k = np.hstack([bits_in_runs(first, 8, 4, 8), bits_in_runs(first + 8, 4, 2, 4)])
    yield "unpacks scales and minima as Q3_K's scales are", own, as_q3_k


def _in_two_parts(kind: str) -> Elsewhere:
    """Six-bit scales whose low bits and high bits lie apart: Q3_K's and IQ4_XS's."""
    own = six_bit_scales(kind)
    for row, end in _in_a_row(own):
        yield f"takes six-bit scales one after the other{end}", own, row
    for what, some in (("low", own[:, :4]), ("high", own[:, 4:])):
        for says, other in _in_runs(some):
            yield f"takes the {what} bits of {says}", some, other


def _in_nibbles(kind: str) -> Elsewhere:
    """A scale and a minimum in each byte: Q2_K's."""
    own = bits_of(kind, "scales")
    yield "swaps scale and minimum nibbles", own, np.roll(own, 16, axis=0)
    yield f"{SHARED}: blocks of 32 for 16", own, own[np.arange(32) // 2 * 2]
    for row, end in _in_a_row(own):
        yield f"takes four-bit scales, then minima, one after the other{end}", own, row


SCALE_ORDERS: Mapping[str, Callable[[str], Elsewhere]] = {
    "Q4_K": _with_minima, "Q5_K": _with_minima, "Q3_K": _in_two_parts, "IQ4_XS": _in_two_parts, "Q2_K": _in_nibbles,
}  # fmt: skip


def _in_a_row(own: Bits) -> Iterator[tuple[Bits, str]]:
    """As many elements of as many bits from the same byte on, as a string of bits."""
    for highest_first, end in ((False, ""), (True, ", the highest bit of a byte first")):
        yield bits_in_a_row(int(own.min()) // 8, *own.shape, highest_first=highest_first), end


def _in_runs(own: Bits) -> Iterator[tuple[str, Bits]]:
    """The parts of each byte taken for neighbouring scales, or for scales as far apart as there are bytes."""
    first, size = int(own.min()) // 8, own.size // 8
    for run, whose in ((1, "neighbouring scales"), (size, f"scales {size} apart")):
        for highest_first, end in ((False, ""), (True, ", the highest part first")):
            other = bits_in_runs(first, size, own.shape[1], run, highest_first=highest_first)
            if not np.array_equal(own, other):
                yield f"{whose} from one byte{end}", other


def _unsigned(blocks: Array, decode: Decode) -> Array:
    """Q6_K's values, by scales of 0 to 255."""
    scale = blocks[:, field_of("Q6_K", "scales")].view(np.int8).astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(scale == 0, 1, (scale % 256) / scale)
    return np.asarray((decode(blocks).reshape(-1, 16, 16) * ratio[..., None]).reshape(-1, 256))


def _biased(blocks: Array, decode: Decode) -> Array:
    """Q3_K's values, by scales of which 32 is not subtracted: of 16, four low bits each, then two high bits each."""
    where = field_of("Q3_K", "scales")
    ones = np.repeat(np.array([0x11, 0xAA], np.uint8), [8, 4])  # every scale 33: 1 once 32 is subtracted
    first, last = blocks[:, where][:, :8], blocks[:, where][:, 8:]
    low = np.concatenate([first & 15, first >> 4], axis=1)
    high = np.concatenate([(last >> shift) & 3 for shift in (0, 2, 4, 6)], axis=1)
    scales = np.asarray(low | (high << 4), np.float32)
    quants = decode(changed(blocks, where, ones)).reshape(-1, 16, 16)
    return (quants * scales[..., None]).reshape(-1, 256)


def as_bf16(bits: Array) -> Array:
    """Sixteen bits as a bfloat16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


SCALE_READINGS = (  # of d: cause, variant, in words, its bits -> what is multiplied by
    ("scale-missing", "none", "leaves out {}'s scale d", lambda bits: np.ones(len(bits), np.float32)),
    ("scale-missing", "bf16", "reads {}'s scale as bfloat16; it is float16", as_bf16),
    ("scale-sign", "sign", "leaves out the sign of {}'s scale d", lambda bits: abs(bits.view(np.float16).astype("f4"))),
    ("scale-whole", "whole", "reads {}'s scale as a whole number", lambda bits: bits.astype(np.float32)),
)


def scale_readings(kind: str) -> Iterator[Misreading]:
    """The scale left out, or read as something else."""
    if "d" in FIELDS[kind]:
        for cause, variant, says, of in SCALE_READINGS:
            yield Misreading(says.format(kind), _rescaled(kind, of), variant, cause)


def _rescaled(kind: str, of: Change) -> Misread:
    """Values as another scale would make them: they are linear in it."""
    where = field_of(kind, "d")

    def read(blocks: Array, decode: Decode) -> Array:
        bits = np.ascontiguousarray(blocks[:, where]).view(np.uint16)[:, 0]
        none, one = (decode(changed(blocks, where, _bytes(value))) for value in (0.0, 1.0))
        with np.errstate(all="ignore"):
            return np.asarray(none + (one - none) * of(bits)[:, None])

    return read


def _bytes(value: float) -> Array:
    return np.frombuffer(np.float16(value).tobytes(), np.uint8)


@block_bug(fix="read the block's scale d as float16, and multiply by it")
def scale_missing(kind: str, _: int) -> Iterator[Misreading]:
    """The blocks' scale is left out, or read as bfloat16."""
    if kind in WHOLE_NUMBERS:
        yield from (each for each in scale_readings(kind) if each.cause == "scale-missing")


@block_bug(
    fix="blocks hold 32 values (K-quants: 256) and follow one another without gaps",
    source="1bit-MONSTER#1234",
)
def block_size_wrong(kind: str, per_row: int) -> Iterator[Misreading]:
    """The scale of a neighbouring block is used: the block size or the stride is wrong."""
    if kind not in WHOLE_NUMBERS or per_row < 2:
        return
    n, here = block_sizes(kind)[0], np.arange(per_row)
    fix = f"scale each {n} values by their own block's d"
    doubled, following, preceding = here // 2 * 2, np.roll(here, -1), np.roll(here, 1)
    says = f"takes every second scale: blocks of {2 * n} for {n} ({kind})"
    yield Misreading(says, _scaled_by(kind, doubled), "double", fix=fix)
    says = f"scales each {kind} block by the next one's scale"
    yield Misreading(says, _scaled_by(kind, following), "next", fix=fix)
    says = f"scales each {kind} block by the one before's scale"
    yield Misreading(says, _scaled_by(kind, preceding), "previous", fix=fix)


def _scaled_by(kind: str, order: Array) -> Misread:
    """Each block of a row with the scale of another one."""
    return with_field(kind, "d", lambda d: d.reshape(-1, len(order), 2)[:, order].reshape(-1, 2))
