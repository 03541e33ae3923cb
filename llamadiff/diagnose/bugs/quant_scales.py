"""Scales, minima and places of quantized blocks, and how people misread them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.diagnose.bugs.quant_blocks import (
    BLOCK_BYTES,
    FIELDS,
    WITH_MINIMA,
    Decode,
    Misread,
    Reading,
    StoredWeight,
    changed,
    field_of,
    half_at,
    misreading,
    misreads,
    unpacked,
)

Array = NDArray[Any]


def _packed(sc: Array, mn: Array) -> Array:
    """The inverse of ``unpacked``."""
    first = sc[:, :4] | (sc[:, 4:] >> 4 << 6)
    second = mn[:, :4] | (mn[:, 4:] >> 4 << 6)
    return np.concatenate([first, second, (sc[:, 4:] & 15) | (mn[:, 4:] & 15) << 4], axis=1).astype(np.uint8)


@misreading(fix="subtract the (sub-)block's minimum (Q4_1 and Q5_1: add it)", source="aprender#199, mlx#3664")
def minima_wrong(r: StoredWeight) -> Iterator[Reading]:
    """The blocks' minima are ignored, have the wrong sign, or change places with the scales."""
    kind = r.kind
    if kind not in WITH_MINIMA:
        return
    m, d = field_of(kind, "m"), field_of(kind, "d")
    sign = "adds" if kind.endswith("K") else "subtracts"
    says = {
        "none": f"ignores {kind}'s minima", "sign": f"{sign} {kind}'s minima instead of the opposite",
        "swapped": f"swaps {kind}'s scale and minimum",
    }  # fmt: skip
    yield from misreads(r, lambda b, decode: decode(changed(b, m, 0)), says["none"], "none")
    flip = np.array([0, 0x80], np.uint8)
    yield from misreads(r, lambda b, decode: decode(changed(b, m, b[:, m] ^ flip)), says["sign"], "sign")
    swapped: Misread = lambda b, decode: decode(changed(changed(b, m, b[:, d]), d, b[:, m]))  # noqa: E731
    yield from misreads(r, swapped, says["swapped"], "swapped")


@misreading(fix="unpack the six-bit scales as ggml's get_scale_min_k4 does", source="aprender#199, mlx#3664")
def scales_misread(r: StoredWeight) -> Iterator[Reading]:
    """The K-quants' packed scales are unpacked wrongly: upper bits, order, sign, offset."""
    kind = r.kind
    if "scales" not in FIELDS.get(kind, {}):
        return
    where = field_of(kind, "scales")
    for says, change in _scale_mistakes(kind).items():
        misread: Misread = lambda b, decode, change=change: decode(changed(b, where, change(b[:, where])))  # type: ignore[misc]  # noqa: E731
        yield from misreads(r, misread, f"{says} ({kind})", says)
    if kind == "Q6_K":

        def unsigned(blocks: Array, decode: Decode) -> Array:
            scale = blocks[:, where].view(np.int8).astype(np.float32)
            with np.errstate(divide="ignore", invalid="ignore"):
                ratio = np.where(scale == 0, 1, (scale % 256) / scale)
            return (decode(blocks).reshape(-1, 16, 16) * ratio[..., None]).reshape(-1, 256)

        yield from misreads(r, unsigned, "reads Q6_K's scales as unsigned bytes", "unsigned")
    if kind == "Q3_K":
        ones = np.repeat(np.array([0x11, 0xAA], np.uint8), [8, 4])  # every scale 33: 1 once 32 is subtracted

        def biased(blocks: Array, decode: Decode) -> Array:
            quants = decode(changed(blocks, where, ones)).reshape(-1, 16, 16)
            return (quants * _q3_scales(blocks[:, where])[..., None]).reshape(-1, 256)

        yield from misreads(r, biased, "does not subtract 32 from Q3_K's scales", "offset")


def _scale_mistakes(kind: str) -> dict[str, Callable[[Array], Array]]:
    if kind in ("Q4_K", "Q5_K"):
        return {
            "leaves out the upper bits of the last four scales and minima": lambda s: np.concatenate(
                [s[:, :8] & 63, s[:, 8:]], axis=1
            ),
            "swaps scales and minima of the sub-blocks": lambda s: _packed(*reversed(unpacked(s))),
            "swaps the nibbles of the last four scales and minima": lambda s: np.concatenate(
                [s[:, :8], (s[:, 8:] << 4) | (s[:, 8:] >> 4)], axis=1
            ),
            "gives two neighbouring sub-blocks one scale: blocks of 64 for 32": lambda s: _packed(
                *(np.repeat(part[:, ::2], 2, axis=1) for part in unpacked(s))
            ),
        }
    if kind == "Q2_K":
        return {
            "swaps scale and minimum nibbles": lambda s: (s << 4) | (s >> 4),
            "gives two neighbouring sub-blocks one scale: blocks of 32 for 16": lambda s: np.repeat(
                s[:, ::2], 2, axis=1
            ),
        }
    if kind == "Q6_K":
        return {
            "gives two neighbouring sub-blocks one scale: blocks of 32 for 16": lambda s: np.repeat(
                s[:, ::2], 2, axis=1
            ),
        }
    return {
        "leaves out the upper bits of the scales": lambda s: np.concatenate(
            [s[:, :8], np.zeros_like(s[:, 8:])], axis=1
        ),
    }


def _q3_scales(s: Array) -> Array:
    """Sixteen six-bit scales of a Q3_K block, [n, 12] -> [n, 16]: four low bits each, then two high bits each."""
    low = np.concatenate([s[:, :8] & 15, s[:, :8] >> 4], axis=1)
    high = np.concatenate([(s[:, 8:] >> shift) & 3 for shift in (0, 2, 4, 6)], axis=1)
    return np.asarray(low | (high << 4), np.float32)


@misreading(fix="multiply by the block's scale d")
def scale_missing(r: StoredWeight) -> Iterator[Reading]:
    """The blocks' scale is left out, or read as bfloat16."""
    kind = r.kind
    if not kind:
        return
    where = field_of(kind, "d")
    one = np.frombuffer(np.float16(1).tobytes(), np.uint8)
    yield from misreads(r, lambda b, decode: decode(changed(b, where, one)), f"leaves out {kind}'s scale d", "none")

    def as_bf16(blocks: Array, decode: Decode) -> Array:
        bits = np.ascontiguousarray(blocks[:, where]).view(np.uint16).astype(np.uint32) << 16
        d = half_at(blocks, where)
        with np.errstate(all="ignore"):
            return decode(blocks) * np.where(d == 0, 1, bits.view(np.float32) / d)

    if kind in ("Q4_0", "Q5_0", "Q8_0", "Q3_K", "Q6_K"):
        yield from misreads(r, as_bf16, f"reads {kind}'s scale as bfloat16; it is float16", "bf16")


@misreading(
    fix="blocks hold 32 values (K-quants: 256) and follow one another without gaps",
    source="1bit-MONSTER#1234",
)
def block_size_wrong(r: StoredWeight) -> Iterator[Reading]:
    """The scale of a neighbouring block is used: the block size or the stride is wrong."""
    kind = r.kind
    if not kind:
        return
    where = field_of(kind, "d")
    per_row = r.w.shape(r.name)[-1] // r.w.block_size(r.name)
    if per_row < 2:
        return

    def neighbour(shift: int) -> Misread:
        def misread(blocks: Array, decode: Decode) -> Array:
            rows = blocks[:, where].reshape(-1, per_row, 2)
            return decode(changed(blocks, where, np.roll(rows, -shift, axis=1).reshape(-1, 2)))

        return misread

    def doubled(blocks: Array, decode: Decode) -> Array:
        rows = blocks[:, where].reshape(-1, per_row, 2)
        return decode(changed(blocks, where, rows[:, np.arange(per_row) // 2 * 2].reshape(-1, 2)))

    n = r.w.block_size(r.name)
    yield from misreads(r, doubled, f"takes every second scale: blocks of {2 * n} for {n} ({kind})", "double")
    yield from misreads(r, neighbour(1), f"scales each {kind} block by the next one's scale", "next")
    yield from misreads(r, neighbour(-1), f"scales each {kind} block by the one before's scale", "previous")


@misreading(
    fix="a tensor starts at data offset + its own offset; the data starts at a multiple of general.alignment",
    source="1bit-MONSTER#1234",
)
def tensor_offset_wrong(r: StoredWeight) -> Iterator[Reading]:
    """The tensor is read from the wrong place: off by a block, or by the alignment."""
    w = r.w
    if len(w.shape(r.name)) != 2:
        return
    raw = w.stored(r.name)
    size = BLOCK_BYTES.get(w.type(r.name), raw.dtype.itemsize)
    for shift in dict.fromkeys((32, -32, size, -size, 16, -16)):
        rows = w.stored_beside(r.name, shift)
        if rows is not None:
            says = f"reads {r.name} from {abs(shift)} bytes {'after' if shift > 0 else 'before'} its start"
            yield Reading(replace(r, beside=rows), says, f"{shift:+d}")
