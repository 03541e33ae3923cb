"""Quantized blocks, and how people misread them: nibbles, high bits, scales, minima, sizes, offsets.

A misreading is written as what it does to a block's bytes before gguf-py decodes them, or to the values after. Bytes of
a block, by field (ggml-common.h):

    Q4_0  d:2 qs:16            Q4_1  d:2 m:2 qs:16        Q5_0  d:2 qh:4 qs:16      Q5_1  d:2 m:2 qh:4 qs:16
    Q8_0  d:2 qs:32            Q2_K  scales:16 qs:64 d:2 dmin:2                     Q3_K  hmask:32 qs:64 scales:12 d:2
    Q4_K  d:2 dmin:2 scales:12 qs:128                     Q5_K  d:2 dmin:2 scales:12 qh:32 qs:128
    Q6_K  ql:128 qh:64 scales:16 d:2
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from llamaref import Weights
from numpy.typing import NDArray

Array = NDArray[Any]
Decode = Callable[[Array], Array]  # blocks [n, bytes] -> values [n, block]
Misread = Callable[[Array, Decode], Array]

FIELDS: dict[str, dict[str, tuple[int, int]]] = {
    "Q4_0": {"d": (0, 2), "qs": (2, 18)},
    "Q4_1": {"d": (0, 2), "m": (2, 4), "qs": (4, 20)},
    "Q5_0": {"d": (0, 2), "qh": (2, 6), "qs": (6, 22)},
    "Q5_1": {"d": (0, 2), "m": (2, 4), "qh": (4, 8), "qs": (8, 24)},
    "Q8_0": {"d": (0, 2), "qs": (2, 34)},
    "Q2_K": {"scales": (0, 16), "qs": (16, 80), "d": (80, 82), "m": (82, 84)},
    "Q3_K": {"qh": (0, 32), "qs": (32, 96), "scales": (96, 108), "d": (108, 110)},
    "Q4_K": {"d": (0, 2), "m": (2, 4), "scales": (4, 16), "qs": (16, 144)},
    "Q5_K": {"d": (0, 2), "m": (2, 4), "scales": (4, 16), "qh": (16, 48), "qs": (48, 176)},
    "Q6_K": {"qs": (0, 128), "qh": (128, 192), "scales": (192, 208), "d": (208, 210)},
}
LEGACY, WITH_MINIMA, WITH_HIGH_BITS = (
    ("Q4_0", "Q4_1", "Q5_0", "Q5_1"), ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K"), ("Q5_0", "Q5_1", "Q3_K", "Q5_K", "Q6_K")
)  # fmt: skip


def field_of(kind: str, name: str) -> slice:
    """The bytes of a block's field."""
    return slice(*FIELDS[kind][name])


def changed(blocks: Array, where: slice, to: Array | int) -> Array:
    """Blocks with other bytes in one field."""
    out = blocks.copy()
    out[:, where] = to
    return out


@dataclass(frozen=True)
class StoredWeight:
    """A weight of a file; where it is misread, how its rows are read, or what is read in their place."""

    w: Weights
    name: str
    read: Decode | None = None
    beside: Array | None = None

    @property
    def kind(self) -> str:
        """Its type, if that is one of blocks that are known here."""
        kind = self.w.type(self.name) if self.name in self.w else ""
        return kind if kind in FIELDS else ""


@dataclass(frozen=True)
class Reading:
    """A weight as somebody reads it, and what that is, as a clause; ``variant`` tells it from the bug's others."""

    weight: StoredWeight
    says: str
    variant: str = ""


@dataclass(frozen=True)
class BlockBug:
    """A way to misread blocks that engines are known to have, and what to do about it."""

    name: str
    about: str
    fix: str
    source: str
    readings: Callable[[StoredWeight], Iterator[Reading]]


MISREADINGS: dict[str, BlockBug] = {}
Readings = Callable[[StoredWeight], Iterator[Reading]]


def misreading(*, fix: str, source: str = "") -> Callable[[Readings], Readings]:
    """Register a function that misreads weights; its name is the bug's name, its docstring what the bug is."""

    def register(readings: Readings) -> Readings:
        name, about = readings.__name__.replace("_", "-"), " ".join((readings.__doc__ or "").split())
        MISREADINGS[name] = BlockBug(name, about, fix, source, readings)
        return readings

    return register


def misreads(r: StoredWeight, misread: Misread, says: str, variant: str = "") -> Iterator[Reading]:
    """The weight with its blocks read so."""
    yield Reading(replace(r, read=_decoder(r, misread)), says, variant)


def _decoder(r: StoredWeight, misread: Misread) -> Decode:
    size, n = BLOCK_BYTES[r.kind], r.w.block_size(r.name)

    def decode(rows: Array) -> Array:
        blocks = np.ascontiguousarray(rows).reshape(-1, size)
        values = misread(blocks, lambda some: r.w.decoded(r.name, some))
        return np.asarray(values, np.float32).reshape(len(rows), rows.shape[-1] // size * n)

    return decode


BLOCK_BYTES = {kind: max(end for _, end in fields.values()) for kind, fields in FIELDS.items()}


def _interleaved(kind: str) -> Misread:
    """Byte j's nibbles as values 2j and 2j + 1; ggml keeps them half a (sub-)block apart."""
    half = 16 if kind in LEGACY else 32

    def misread(blocks: Array, decode: Decode) -> Array:
        values = decode(blocks)
        return values.reshape(len(values), -1, 2, half).swapaxes(-1, -2).reshape(values.shape)

    return misread


@misreading(
    fix="low nibbles are the first half of the (sub-)block, high nibbles the second",
    source="imp#567, aprender#1621",
)
def nibbles_interleaved(r: StoredWeight) -> Iterator[Reading]:
    """A byte's two nibbles are taken for neighbouring values."""
    kind = r.kind
    says = f"takes a {kind} byte's two nibbles for neighbours"
    if kind in ("Q4_K", "Q5_K"):
        yield from misreads(r, _interleaved_k(kind), says)
    elif kind in LEGACY:
        yield from misreads(r, _interleaved(kind), says)
    if kind in WITH_HIGH_BITS and kind in (*LEGACY, "Q5_K"):
        yield from misreads(r, _low_bits_interleaved(kind), f"{says}, but not their high bits", "low")


def _low_bits_interleaved(kind: str) -> Misread:
    """The same for the nibbles alone: high bits stay with the place in the block."""
    where, half = field_of(kind, "qs"), 16 if kind in LEGACY else 32

    def misread(blocks: Array, decode: Decode) -> Array:
        """Bytes as they would have to be for ggml's order to give what neighbours give."""
        qs = blocks[:, where].reshape(len(blocks), -1, half)
        values = np.stack([qs & 15, qs >> 4], axis=-1).reshape(len(blocks), -1, 2, half)
        return decode(changed(blocks, where, (values[:, :, 0] | values[:, :, 1] << 4).reshape(len(blocks), -1)))

    return misread


def _interleaved_k(kind: str) -> Misread:
    """Neighbours with the scale of the place where they land: quants are permuted, scales are not."""

    def misread(blocks: Array, decode: Decode) -> Array:
        quants = _quants(kind, blocks)  # [n, 256]
        moved = quants.reshape(len(blocks), 4, 2, 32).swapaxes(-1, -2).reshape(len(blocks), 8, 32)
        scale, minimum = _scales(kind, blocks)
        return (moved * scale[..., None] - minimum[..., None]).reshape(len(blocks), 256)

    return misread


def _quants(kind: str, blocks: Array) -> Array:
    """Unsigned quants of Q4_K and Q5_K: [n, 256]."""
    qs = blocks[:, field_of(kind, "qs")].reshape(-1, 4, 1, 32)
    quants = np.concatenate([qs & 15, qs >> 4], axis=2).reshape(len(blocks), 8, 32)
    if kind == "Q5_K":
        bits = (blocks[:, field_of(kind, "qh")][:, None] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
        quants = quants + 16 * bits
    return quants.reshape(len(blocks), 256).astype(np.float32)


def _scales(kind: str, blocks: Array) -> tuple[Array, Array]:
    """Scale and minimum of each of the eight sub-blocks of Q4_K and Q5_K: [n, 8] each."""
    sc, mn = unpacked(blocks[:, field_of(kind, "scales")])
    d, m = (half_at(blocks, field_of(kind, name)) for name in ("d", "m"))
    return d * sc, m * mn


def half_at(blocks: Array, where: slice) -> Array:
    """A float16 field of each block: [n, 1]."""
    return np.ascontiguousarray(blocks[:, where]).view(np.float16).astype(np.float32)


def unpacked(s: Array) -> tuple[Array, Array]:
    """Six-bit scales and minima of a K block, [n, 12] -> [n, 8] each (ggml-quants.c, get_scale_min_k4)."""
    low = s[:, 0:4], s[:, 4:8], s[:, 8:12]
    sc = np.concatenate([low[0] & 63, (low[2] & 15) | (low[0] >> 6 << 4)], axis=1)
    mn = np.concatenate([low[1] & 63, (low[2] >> 4) | (low[1] >> 6 << 4)], axis=1)
    return sc, mn


@misreading(fix="the low nibble comes first", source="imp#567, aprender#1621")
def nibbles_swapped(r: StoredWeight) -> Iterator[Reading]:
    """High and low nibbles are swapped."""
    kind = r.kind
    if kind and kind not in ("Q8_0", "Q2_K", "Q3_K"):
        where = field_of(kind, "qs")

        def misread(blocks: Array, decode: Decode) -> Array:
            q = blocks[:, where]
            return decode(changed(blocks, where, (q << 4) | (q >> 4)))

        yield from misreads(r, misread, f"swaps the high and low nibbles of {kind}")


@misreading(fix="subtract the type's offset from the quants (8, 16, 32) before they are scaled")
def quants_offset(r: StoredWeight) -> Iterator[Reading]:
    """The quants' offset is not subtracted, or signs are misread."""
    kind = r.kind
    offset = {"Q4_0": 8.0, "Q5_0": 16.0, "Q6_K": 32.0, "Q3_K": 4.0}.get(kind)
    if offset is not None:
        says = f"does not subtract {offset:g} from {kind}'s quants"
        yield from misreads(r, lambda b, decode: decode(b) - _zero_quants(kind, b, decode), says, "offset")
    if kind == "Q4_0":
        where = field_of(kind, "qs")
        says = "takes Q4_0's nibbles for two's complement; they count from -8"
        yield from misreads(r, lambda b, decode: decode(changed(b, where, b[:, where] ^ 0x88)), says, "signed")
    if kind == "Q8_0":

        def misread(blocks: Array, decode: Decode) -> Array:
            negative = blocks[:, field_of("Q8_0", "qs")] >= 128
            return decode(blocks) + np.float32(256) * negative * half_at(blocks, field_of("Q8_0", "d"))

        yield from misreads(r, misread, "reads Q8_0's quants as unsigned bytes", "unsigned")


def _zero_quants(kind: str, blocks: Array, decode: Decode) -> Array:
    """What a block decodes to when its stored quants are zero: the offset times the scales."""
    zeroed = changed(blocks, field_of(kind, "qs"), 0)
    return decode(changed(zeroed, field_of(kind, "qh"), 0) if "qh" in FIELDS[kind] else zeroed)


@misreading(fix="add the high bits from qh (hmask) to the low ones", source="aprender#199, mlx#3664")
def high_bits_ignored(r: StoredWeight) -> Iterator[Reading]:
    """The quants' high bits are ignored, taken for all set, or inverted."""
    kind = r.kind
    if kind in WITH_HIGH_BITS:
        where = field_of(kind, "qh")
        for name, to in {"ignores": 0, "takes for all set": 255}.items():
            says = f"{name} the high bits of {kind}'s quants"
            yield from misreads(r, lambda b, decode, to=to: decode(changed(b, where, to)), says, name)  # type: ignore[misc]
        yield from misreads(
            r,
            lambda b, decode: decode(changed(b, where, ~b[:, where])),
            f"inverts the high bits of {kind}'s quants",
            "not",
        )


@misreading(
    fix="bit j of qh belongs to value j of the low half, bit j + 16 to the high half",
    source="aprender#199, mlx#3664",
)
def high_bits_misplaced(r: StoredWeight) -> Iterator[Reading]:
    """The quants' high bits go to the wrong values."""
    kind = r.kind
    if kind not in WITH_HIGH_BITS:
        return
    where = field_of(kind, "qh")

    def moved(change: Callable[[Array], Array]) -> Misread:
        return lambda blocks, decode: decode(changed(blocks, where, change(blocks[:, where])))

    if kind in ("Q5_0", "Q5_1"):
        variants: dict[str, Callable[[Array], Array]] = {
            "takes the first 16 high bits for both halves": lambda q: np.concatenate([q[:, :2], q[:, :2]], axis=1),
            "swaps the high bits of the two halves": lambda q: np.concatenate([q[:, 2:], q[:, :2]], axis=1),
            "takes high bits two by two": _two_by_two,
        }
    else:
        half = (where.stop - where.start) // 2
        variants = {
            "swaps the two halves of the high bits": lambda q: np.concatenate([q[:, half:], q[:, :half]], axis=1),
            "reads the high bits from the other end of the byte": _reversed_bits(kind),
        }
    for says, change in variants.items():
        yield from misreads(r, moved(change), f"{says} ({kind})", says)


def _two_by_two(qh: Array) -> Array:
    """Value j of the two halves takes bits 2j and 2j + 1."""
    bits = np.unpackbits(qh, axis=1, bitorder="little").reshape(-1, 16, 2).swapaxes(1, 2)
    return np.packbits(bits.reshape(-1, 32), axis=1, bitorder="little")


def _reversed_bits(kind: str) -> Callable[[Array], Array]:
    """Fields within each byte in the opposite order: of two bits in Q6_K, of one elsewhere."""
    if kind == "Q6_K":
        return lambda q: (q << 6) | ((q & 12) << 2) | ((q & 48) >> 2) | (q >> 6)
    return lambda q: np.packbits(np.unpackbits(q, axis=1, bitorder="little"), axis=1)


@misreading(fix="values of one K-quant byte are 32 (Q6_K: also 64) apart in the block, not neighbours")
def quants_linear(r: StoredWeight) -> Iterator[Reading]:
    """The two-bit fields of a byte (Q2_K, Q3_K) are taken for neighbouring values."""
    kind = r.kind
    if kind not in ("Q2_K", "Q3_K"):
        return
    where = field_of(kind, "qs")

    def misread(blocks: Array, decode: Decode) -> Array:
        """Bytes as they would have to be for ggml's order to give what neighbours give."""
        two_bits = ((blocks[:, where][..., None] >> np.array([0, 2, 4, 6], np.uint8)) & 3).reshape(-1, 256)
        strided = two_bits.reshape(-1, 2, 4, 32).astype(np.uint8)
        qs = strided[:, :, 0] | strided[:, :, 1] << 2 | strided[:, :, 2] << 4 | strided[:, :, 3] << 6
        return decode(changed(blocks, where, qs.reshape(-1, 64)))

    yield from misreads(r, misread, f"takes the four values of a {kind} byte for neighbours")
