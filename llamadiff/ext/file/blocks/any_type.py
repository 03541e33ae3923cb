"""The ways to misread a type's blocks that need nothing but its layout: fields, signs, scales, strides, other types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from llamaref.weights import block_sizes
from numpy.typing import NDArray

from llamadiff.ext.file.blocks.fields import FIELDS, changed, values_of
from llamadiff.ext.file.blocks.misreading import (
    Change,
    Decode,
    Misread,
    Misreading,
    all_set,
    every_second_twice,
    first_half_twice,
    halves_swapped,
    parts_reversed,
    with_field,
    with_nibbles_swapped,
    zero,
)
from llamadiff.ext.file.blocks.scales import as_bf16, scale_readings

Array = NDArray[Any]
WORDS = {
    "d": "scale d", "m": "minimum", "e": "scale", "qs": "quants", "qh": "high bits", "signs": "signs",
    "scales": "scales", "scales_h": "scales' high bits", "scales_l": "scales' low bits", "values": "values",
}  # fmt: skip


def layout_errors(kind: str) -> Iterator[Misreading]:
    """Every such misreading of a type of blocks, the likeliest first."""
    yield from _signs(kind)
    yield from _fields(kind)
    yield from scale_readings(kind)
    yield from _other_types(kind)
    yield from _strides(kind)


def _signs(kind: str) -> Iterator[Misreading]:
    yield Misreading(f"gives {kind}'s values the other sign", lambda b, decode: -decode(b), cause="sign")
    yield Misreading(f"leaves out the sign of {kind}'s values", lambda b, decode: np.abs(decode(b)), cause="sign")


def _fields(kind: str) -> Iterator[Misreading]:
    """Each field's bytes read in another way."""
    for name, (first, last) in FIELDS[kind].items():
        what, size = f"{kind}'s {WORDS[name]}", last - first
        for least, cause, says, change in OF_A_FIELD:
            if size >= least:
                yield Misreading(says.format(what), with_field(kind, name, change), cause=cause)
        if size > 1:
            where = slice(first, last)
            yield Misreading(f"reads {what} one byte late", _shifted(where, -1), cause="byte-late")
            yield Misreading(f"reads {what} one byte early", _shifted(where, 1), cause="byte-early")


def _shifted(where: slice, shift: int) -> Misread:
    """A field read from a place beside its own, its end from the block's other end."""
    return lambda blocks, decode: decode(changed(blocks, where, np.roll(blocks, shift, axis=1)[:, where]))


def _twos_swapped(field: Array) -> Array:
    if field.shape[1] % 2:
        return field
    return field.reshape(len(field), -1, 2)[..., ::-1].reshape(field.shape)


OF_A_FIELD: tuple[tuple[int, str, str, Change], ...] = (  # bytes that it must have, cause, in words, what is read
    (1, "nibbles-swapped", "swaps the nibbles of {}", with_nibbles_swapped),
    (1, "field-ignored", "ignores {}", zero),
    (1, "field-set", "takes {} for all set", all_set),
    (1, "field-inverted", "inverts {}", np.invert),
    (1, "bits-reversed", "reads {} from the other end of each byte", parts_reversed(1)),
    (1, "fields-reversed", "reads the two-bit fields of {} from the other end", parts_reversed(2)),
    (2, "byte-order", "reads {} in the other byte order", lambda field: field[:, ::-1]),
    (2, "halves-swapped", "swaps the halves of {}", halves_swapped),
    (2, "pairs-swapped", "reads {} with each two bytes swapped", _twos_swapped),
    (2, "every-second", "reads every second byte of {} twice", every_second_twice),
    (2, "first-half-twice", "reads the first half of {} for both", first_half_twice),
    (1, "low-nibbles", "reads the low nibbles of {} alone", lambda field: field & 15),
    (1, "high-nibbles", "reads the high nibbles of {} alone", lambda field: field & 240),
    (1, "low-nibble-twice", "reads the low nibble of {} for both", lambda field: (field & 15) * 17),
    (1, "high-nibble-twice", "reads the high nibble of {} for both", lambda field: (field >> 4) * 17),
    (1, "highest-bit", "leaves out the highest bit of each byte of {}", lambda field: field & 127),
    (1, "neighbours-field", "takes {} of the next block", lambda field: np.roll(field, -1, axis=0)),
    (1, "neighbours-field", "takes {} of the block before", lambda field: np.roll(field, 1, axis=0)),
)


def _same_size(kind: str) -> Iterator[tuple[str, int]]:
    """The types whose blocks have as many values, with the bytes of one."""
    values, _ = block_sizes(kind)
    return ((other, block_sizes(other)[1]) for other in FIELDS if block_sizes(other)[0] == values)


def _other_types(kind: str) -> Iterator[Misreading]:
    """Read as a neighbouring type: of as many values, whatever its bytes."""
    for other, size in _same_size(kind):
        if other != kind:
            yield Misreading(f"reads {kind} as {other}", _as_type(other, size), cause="neighbouring-type")


def _as_type(kind: str, size: int) -> Misread:
    def read(blocks: Array, _: Decode) -> Array:
        flat = blocks.reshape(-1)
        count = min(len(blocks), flat.size // size)
        return values_of(kind, flat[: count * size].reshape(count, size))

    return read


def _strides(kind: str) -> Iterator[Misreading]:
    """Blocks that are taken to be larger or smaller than they are: those of a neighbouring type."""
    own, types = block_sizes(kind)[1], {size: other for other, size in _same_size(kind)}
    for step in (*types, own + 2, own - 2, own + 1, own - 1, own + 4, own - 4):
        if step != own and step > 0:
            of = f", {types[step]}'s" if step in types else ""
            says = f"takes {kind}'s blocks for {step} bytes{of}; they have {own}"
            yield Misreading(says, _strided(step), cause="stride")


def _strided(step: int) -> Misread:
    def read(blocks: Array, decode: Decode) -> Array:
        own, flat = blocks.shape[1], blocks.reshape(-1)
        count = min(len(blocks), (flat.size - own) // step + 1)
        places = np.arange(count)[:, None] * step + np.arange(own)
        return decode(flat[places])

    return read


def sixteen_bit_errors(kind: str) -> Iterator[Misreading]:
    """Floats of sixteen bits, taken for the other kind, swapped, or off by a byte."""
    reads: Mapping[str, Change] = {"F16": _as_f16, "BF16": as_bf16}
    own, (other, of_other) = reads[kind], next(each for each in reads.items() if each[0] != kind)
    for cause, says, read in (
        ("neighbouring-type", f"reads {kind} as {other}", lambda b: of_other(_words(b))),
        ("byte-order", f"reads {kind} in the other byte order", lambda b: own(_words(b).byteswap())),
        ("sign", f"gives {kind}'s values the other sign", lambda b: -own(_words(b))),
        ("sign", f"leaves out the sign of {kind}'s values", lambda b: np.abs(own(_words(b)))),
        ("whole-numbers", f"reads {kind} as whole numbers", lambda b: _words(b).astype(np.float32)),
        ("whole-numbers", f"reads {kind} as signed whole numbers", lambda b: b.view(np.int16).astype(np.float32)),
        (
            "byte-late",
            f"reads {kind} one byte late",
            lambda b: own(_words(np.roll(b, -1))),
        ),
        ("pairs-swapped", f"swaps each two values of {kind}", lambda b: _twos_swapped(own(_words(b)))),
    ):
        yield Misreading(says, _of_bytes(read), cause=cause)


def _of_bytes(read: Change) -> Misread:
    """What asks no decoder."""
    return lambda blocks, _: read(blocks)


def _words(blocks: Array) -> Array:
    return np.ascontiguousarray(blocks).view(np.uint16)


def _as_f16(bits: Array) -> Array:
    return bits.view(np.float16).astype(np.float32)
