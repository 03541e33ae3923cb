"""The ways to misread a type's blocks that need nothing but its layout: fields, signs, scales, strides, other types."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from llamaref.weights import block_sizes, decode
from numpy.typing import NDArray

from llamadiff.diagnose.bugs.quant_blocks import changed
from llamadiff.weights.distance import run_in_words
from llamadiff.weights.foreign_blocks import Decode, ForeignBlocks, Misreading, Way
from llamadiff.weights.layouts import LAYOUTS

Array = NDArray[Any]
WORDS = {
    "d": "scale d", "m": "minimum", "e": "scale", "qs": "quants", "qh": "high bits", "signs": "signs",
    "scales": "scales", "scales_h": "scales' high bits", "scales_l": "scales' low bits", "values": "values",
}  # fmt: skip


def layout_errors(some: ForeignBlocks) -> Iterator[Way]:
    """Every such misreading of a type of blocks, the likeliest first."""
    yield from _signs(some)
    yield from _fields(some)
    yield from _scaled(some)
    yield from _other_types(some)
    yield from _strides(some)


def _fields(some: ForeignBlocks) -> Iterator[Way]:
    """Each field's bytes read in another way."""
    for name, (first, last) in LAYOUTS[some.kind].items():
        where, what = slice(first, last), f"{some.kind}'s {WORDS[name]}"
        for cause, says, change in _changes(name, first, last):
            yield Misreading(cause, says.format(what)), _with(some, where, change)


Change = Callable[[Array], Array]  # blocks -> the bytes of one field


def _with(some: ForeignBlocks, where: slice, change: Change) -> Decode:
    return lambda blocks: some.decoded(changed(blocks, where, change(blocks)))


def _changes(name: str, first: int, last: int) -> Iterator[tuple[str, str, Change]]:
    """Ways to misread the bytes of a field."""
    size, where = last - first, slice(first, last)
    own: Change = lambda b: b[:, where]  # noqa: E731
    yield "nibbles-swapped", "swaps the nibbles of {}", lambda b: (own(b) << 4) | (own(b) >> 4)
    yield "field-ignored", "ignores {}", lambda b: np.zeros_like(own(b))
    yield "field-set", "takes {} for all set", lambda b: np.full_like(own(b), 255)
    yield "field-inverted", "inverts {}", lambda b: ~own(b)
    yield "bits-reversed", "reads {} from the other end of each byte", lambda b: _reversed(own(b), 1)
    yield "fields-reversed", "reads the two-bit fields of {} from the other end", lambda b: _reversed(own(b), 2)
    if size > 1:
        yield "byte-order", "reads {} in the other byte order", lambda b: own(b)[:, ::-1]
        yield "halves-swapped", "swaps the halves of {}", lambda b: np.roll(own(b), size // 2, axis=1)
        yield "pairs-swapped", "reads {} with each two bytes swapped", lambda b: _twos(own(b))
        yield "byte-late", "reads {} one byte late", lambda b: np.roll(b, -1, axis=1)[:, where]
        yield "byte-early", "reads {} one byte early", lambda b: np.roll(b, 1, axis=1)[:, where]
        yield "every-second", "reads every second byte of {} twice", lambda b: np.repeat(own(b)[:, ::2], 2, 1)[:, :size]
        yield "first-half-twice", "reads the first half of {} for both", lambda b: _first_half(own(b))
    yield "low-nibbles", "reads the low nibbles of {} alone", lambda b: own(b) & 15
    yield "high-nibbles", "reads the high nibbles of {} alone", lambda b: own(b) & 240
    yield "low-nibble-twice", "reads the low nibble of {} for both", lambda b: (own(b) & 15) * 17
    yield "high-nibble-twice", "reads the high nibble of {} for both", lambda b: (own(b) >> 4) * 17
    yield "highest-bit", "leaves out the highest bit of each byte of {}", lambda b: own(b) & 127
    yield "neighbours-field", "takes {} of the next block", lambda b: np.roll(own(b), -1, axis=0)
    yield "neighbours-field", "takes {} of the block before", lambda b: np.roll(own(b), 1, axis=0)


def _first_half(field: Array) -> Array:
    half = field[:, : (field.shape[1] + 1) // 2]
    return np.concatenate([half, half], axis=1)[:, : field.shape[1]]


def _twos(field: Array) -> Array:
    if field.shape[1] % 2:
        return field
    return field.reshape(len(field), -1, 2)[..., ::-1].reshape(field.shape)


def _reversed(field: Array, bits: int) -> Array:
    """Each byte's parts of so many bits in the opposite order."""
    parts = np.unpackbits(field, axis=1).reshape(len(field), field.shape[1], 8 // bits, bits)
    return np.packbits(parts[:, :, ::-1].reshape(len(field), -1), axis=1)


def _signs(some: ForeignBlocks) -> Iterator[Way]:
    yield Misreading("sign", f"gives {some.kind}'s values the other sign"), lambda blocks: -some.decoded(blocks)
    yield (
        Misreading("sign", f"leaves out the sign of {some.kind}'s values"),
        lambda blocks: np.abs(some.decoded(blocks)),
    )


def _scaled(some: ForeignBlocks) -> Iterator[Way]:
    """The scale left out, or read as something else; and one factor for all values."""
    place = LAYOUTS[some.kind].get("d")
    if place is not None:
        where = slice(*place)
        for cause, says, of in _SCALES:
            yield Misreading(cause, says.format(some.kind)), _rescaled(some, where, of)
    good = np.isfinite(some.got).all(axis=1) & some.right.any(axis=1)
    ratios = some.got[good].astype(np.float64), some.right[good].astype(np.float64)
    if len(ratios[0]):
        with np.errstate(all="ignore"):
            each = (ratios[0] * ratios[1]).sum(axis=1) / (ratios[1] ** 2).sum(axis=1)
        factor = float(np.median(each))
        if factor and np.isfinite(factor):
            yield Misreading("factor", f"multiplies {some.kind}'s values by {factor:.6g}"), \
                lambda blocks: some.decoded(blocks) * np.float32(factor)  # fmt: skip


def _as_bf16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


_SCALES: tuple[tuple[str, str, Callable[[Array], Array]], ...] = (
    ("scale-missing", "leaves out {}'s scale d", lambda bits: np.ones(len(bits), np.float32)),
    ("scale-missing", "reads {}'s scale as bfloat16; it is float16", _as_bf16),
    ("scale-sign", "leaves out the sign of {}'s scale d", lambda bits: abs(bits.view(np.float16).astype(np.float32))),
    ("scale-whole", "reads {}'s scale as a whole number", lambda bits: bits.astype(np.float32)),
)  # fmt: skip


def _rescaled(some: ForeignBlocks, where: slice, of: Callable[[Array], Array]) -> Decode:
    """Values as another scale would make them: they are linear in it."""

    def read(blocks: Array) -> Array:
        bits = np.ascontiguousarray(blocks[:, where]).view(np.uint16)[:, 0]
        none, one = (some.decoded(changed(blocks, where, _bytes(value))) for value in (0.0, 1.0))
        with np.errstate(all="ignore"):
            return np.asarray(none + (one - none) * of(bits)[:, None])

    return read


def _bytes(value: float) -> Array:
    return np.frombuffer(np.float16(value).tobytes(), np.uint8)


def _other_types(some: ForeignBlocks) -> Iterator[Way]:
    """Read as a neighbouring type: of as many values, whatever its bytes."""
    values, _ = block_sizes(some.kind)
    for kind in LAYOUTS:
        if kind != some.kind and block_sizes(kind)[0] == values and values > 1:
            yield Misreading("neighbouring-type", f"reads {some.kind} as {kind}"), _as_type(kind)


def _as_type(kind: str) -> Decode:
    size = block_sizes(kind)[1]

    def read(blocks: Array) -> Array:
        flat = blocks.reshape(-1)
        count = min(len(blocks), flat.size // size)
        with np.errstate(all="ignore"):
            return decode(kind, flat[: count * size].reshape(count, size)).reshape(count, -1)

    return read


def _strides(some: ForeignBlocks) -> Iterator[Way]:
    """Blocks that are taken to be larger or smaller than they are: those of a neighbouring type."""
    own = some.blocks.shape[1]
    sizes: Mapping[int, str] = {
        block_sizes(kind)[1]: kind for kind in LAYOUTS if block_sizes(kind)[0] == block_sizes(some.kind)[0]
    }
    for step in (*sizes, own + 2, own - 2, own + 1, own - 1, own + 4, own - 4):
        if step != own and step > 0:
            of = f", {sizes[step]}'s" if step in sizes else ""
            yield Misreading("stride", f"takes {some.kind}'s blocks for {step} bytes{of}; they have {own}"), \
                _strided(some, step)  # fmt: skip


def _strided(some: ForeignBlocks, step: int) -> Decode:
    def read(blocks: Array) -> Array:
        own, flat = blocks.shape[1], blocks.reshape(-1)
        count = min(len(blocks), (flat.size - own) // step + 1)
        places = np.arange(count)[:, None] * step + np.arange(own)
        return some.decoded(flat[places])

    return read


def sixteen_bit_errors(some: ForeignBlocks) -> Iterator[Way]:
    """Floats of sixteen bits, taken for the other kind, swapped, or off by a byte."""
    words: Callable[[Array], Array] = lambda b: np.ascontiguousarray(b).view(np.uint16)  # noqa: E731
    half: Callable[[Array], Array] = lambda w: w.view(np.float16).astype(np.float32)  # noqa: E731
    reads = {"F16": half, "BF16": _as_bf16}
    own = reads[some.kind]
    other = next(kind for kind in reads if kind != some.kind)
    kind = some.kind
    yield Misreading("neighbouring-type", f"reads {kind} as {other}"), lambda b: reads[other](words(b))
    yield Misreading("byte-order", f"reads {kind} in the other byte order"), lambda b: own(words(b).byteswap())
    yield Misreading("sign", f"gives {kind}'s values the other sign"), lambda b: -own(words(b))
    yield Misreading("sign", f"leaves out the sign of {kind}'s values"), lambda b: np.abs(own(words(b)))
    yield Misreading("whole-numbers", f"reads {kind} as whole numbers"), lambda b: words(b).astype(np.float32)
    yield Misreading("whole-numbers", f"reads {kind} as signed whole numbers"), \
        lambda b: words(b).view(np.int16).astype(np.float32)  # fmt: skip
    yield (
        Misreading("byte-late", f"reads {kind} one byte late"),
        lambda b: own(words(np.roll(b.reshape(-1), -1).reshape(b.shape))),
    )
    swapped: Callable[[Array], Array] = lambda w: w.reshape(len(w), -1, 2)[..., ::-1].reshape(w.shape)  # noqa: E731
    yield Misreading("pairs-swapped", f"swaps each two values of {kind}"), lambda b: swapped(own(words(b)))
    zero = (some.got == 0).all(axis=0)
    if zero.any():
        where = run_in_words(np.flatnonzero(zero), "value", len(zero))
        yield Misreading("not-written", f"leaves {where} of each {len(zero)} zero"), \
            lambda b: np.where(zero, 0, own(words(b)))  # fmt: skip
