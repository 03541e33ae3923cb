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
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.diagnose.case import Case
from llamadiff.diagnose.embedding import Lookup
from llamadiff.diagnose.known import Change, bug
from llamadiff.diagnose.products import PRODUCTS, Product

Array = NDArray[Any]
Decode = Callable[[Array], Array]  # blocks [n, bytes] -> values [n, block]
Misread = Callable[[Array, Decode], Array]

QUANTIZED = ("embd", *PRODUCTS)
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


def _field(kind: str, name: str) -> slice:
    return slice(*FIELDS[kind][name])


def _changed(blocks: Array, where: slice, to: Array | int) -> Array:
    out = blocks.copy()
    out[:, where] = to
    return out


def _misread(r: Any, case: Case, misread: Misread, says: str, variant: str = "") -> Iterator[Change]:
    """The op with its weight's blocks read so."""
    if isinstance(r, Lookup):
        w, name = case.engine.w, "token_embd.weight"
        decode = _decoder(case, name, misread)
        reading = replace(r, read=lambda ids: decode(w.stored(name, ids)))
        yield Change(reading, says, variant)
    elif isinstance(r, Product) and not r.transposed:
        yield Change(replace(r, decode=_decoder(case, r.name, misread)), says, variant)


def _decoder(case: Case, name: str, misread: Misread) -> Decode:
    w = case.engine.w
    size, n = FIELDS_SIZE[w.type(name)], w.block_size(name)

    def decode(rows: Array) -> Array:
        blocks = np.ascontiguousarray(rows).reshape(-1, size)
        values = misread(blocks, lambda some: w.decoded(name, some))
        return np.asarray(values, np.float32).reshape(len(rows), rows.shape[-1] // size * n)

    return decode


FIELDS_SIZE = {kind: max(end for _, end in fields.values()) for kind, fields in FIELDS.items()}


def _kind(r: Any, case: Case) -> str:
    """The type of an op's weight, if it is one of blocks that are known here."""
    name = "token_embd.weight" if isinstance(r, Lookup) else getattr(r, "name", "")
    kind = case.engine.w.type(name) if name in case.engine.w else ""
    return kind if kind in FIELDS else ""


def _interleaved(kind: str) -> Misread:
    """Byte j's nibbles as values 2j and 2j + 1; ggml keeps them half a (sub-)block apart."""
    half = 16 if kind in LEGACY else 32

    def misread(blocks: Array, decode: Decode) -> Array:
        values = decode(blocks)
        return values.reshape(len(values), -1, 2, half).swapaxes(-1, -2).reshape(values.shape)

    return misread


@bug(
    *QUANTIZED,
    fix="low nibbles are the first half of the (sub-)block, high nibbles the second",
    source="imp#567, aprender#1621",
)
def nibbles_interleaved(r: Any, case: Case) -> Iterator[Change]:
    """A byte's two nibbles are taken for neighbouring values."""
    kind = _kind(r, case)
    says = f"takes a {kind} byte's two nibbles for neighbours"
    if kind in ("Q4_K", "Q5_K"):
        yield from _misread(r, case, _interleaved_k(kind), says)
    elif kind in LEGACY:
        yield from _misread(r, case, _interleaved(kind), says)
    if kind in WITH_HIGH_BITS and kind in (*LEGACY, "Q5_K"):
        yield from _misread(r, case, _low_bits_interleaved(kind), f"{says}, but not their high bits", "low")


def _low_bits_interleaved(kind: str) -> Misread:
    """The same for the nibbles alone: high bits stay with the place in the block."""
    where, half = _field(kind, "qs"), 16 if kind in LEGACY else 32

    def misread(blocks: Array, decode: Decode) -> Array:
        """Bytes as they would have to be for ggml's order to give what neighbours give."""
        qs = blocks[:, where].reshape(len(blocks), -1, half)
        values = np.stack([qs & 15, qs >> 4], axis=-1).reshape(len(blocks), -1, 2, half)
        return decode(_changed(blocks, where, (values[:, :, 0] | values[:, :, 1] << 4).reshape(len(blocks), -1)))

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
    qs = blocks[:, _field(kind, "qs")].reshape(-1, 4, 1, 32)
    quants = np.concatenate([qs & 15, qs >> 4], axis=2).reshape(len(blocks), 8, 32)
    if kind == "Q5_K":
        bits = (blocks[:, _field(kind, "qh")][:, None] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
        quants = quants + 16 * bits
    return quants.reshape(len(blocks), 256).astype(np.float32)


def _scales(kind: str, blocks: Array) -> tuple[Array, Array]:
    """Scale and minimum of each of the eight sub-blocks of Q4_K and Q5_K: [n, 8] each."""
    sc, mn = _unpacked(blocks[:, _field(kind, "scales")])
    d, m = (_half(blocks, _field(kind, name)) for name in ("d", "m"))
    return d * sc, m * mn


def _half(blocks: Array, where: slice) -> Array:
    return np.ascontiguousarray(blocks[:, where]).view(np.float16).astype(np.float32)


def _unpacked(s: Array) -> tuple[Array, Array]:
    """Six-bit scales and minima of a K block, [n, 12] -> [n, 8] each (ggml-quants.c, get_scale_min_k4)."""
    low = s[:, 0:4], s[:, 4:8], s[:, 8:12]
    sc = np.concatenate([low[0] & 63, (low[2] & 15) | (low[0] >> 6 << 4)], axis=1)
    mn = np.concatenate([low[1] & 63, (low[2] >> 4) | (low[1] >> 6 << 4)], axis=1)
    return sc, mn


def _packed(sc: Array, mn: Array) -> Array:
    """The inverse of ``_unpacked``."""
    first = sc[:, :4] | (sc[:, 4:] >> 4 << 6)
    second = mn[:, :4] | (mn[:, 4:] >> 4 << 6)
    return np.concatenate([first, second, (sc[:, 4:] & 15) | (mn[:, 4:] & 15) << 4], axis=1).astype(np.uint8)


@bug(*QUANTIZED, fix="the low nibble comes first", source="imp#567, aprender#1621")
def nibbles_swapped(r: Any, case: Case) -> Iterator[Change]:
    """High and low nibbles are swapped."""
    kind = _kind(r, case)
    if kind and kind not in ("Q8_0", "Q2_K", "Q3_K"):
        where = _field(kind, "qs")

        def misread(blocks: Array, decode: Decode) -> Array:
            q = blocks[:, where]
            return decode(_changed(blocks, where, (q << 4) | (q >> 4)))

        yield from _misread(r, case, misread, f"swaps the high and low nibbles of {kind}")


@bug(*QUANTIZED, fix="subtract the type's offset from the quants (8, 16, 32) before they are scaled")
def quants_offset(r: Any, case: Case) -> Iterator[Change]:
    """The quants' offset is not subtracted, or signs are misread."""
    kind = _kind(r, case)
    offset = {"Q4_0": 8.0, "Q5_0": 16.0, "Q6_K": 32.0, "Q3_K": 4.0}.get(kind)
    if offset is not None:
        says = f"does not subtract {offset:g} from {kind}'s quants"
        yield from _misread(r, case, lambda b, decode: decode(b) - _zero_quants(kind, b, decode), says, "offset")
    if kind == "Q4_0":
        where = _field(kind, "qs")
        says = "takes Q4_0's nibbles for two's complement; they count from -8"
        yield from _misread(r, case, lambda b, decode: decode(_changed(b, where, b[:, where] ^ 0x88)), says, "signed")
    if kind == "Q8_0":

        def misread(blocks: Array, decode: Decode) -> Array:
            negative = blocks[:, _field("Q8_0", "qs")] >= 128
            return decode(blocks) + np.float32(256) * negative * _half(blocks, _field("Q8_0", "d"))

        yield from _misread(r, case, misread, "reads Q8_0's quants as unsigned bytes", "unsigned")


def _zero_quants(kind: str, blocks: Array, decode: Decode) -> Array:
    """What a block decodes to when its stored quants are zero: the offset times the scales."""
    zeroed = _changed(blocks, _field(kind, "qs"), 0)
    return decode(_changed(zeroed, _field(kind, "qh"), 0) if "qh" in FIELDS[kind] else zeroed)


@bug(*QUANTIZED, fix="add the high bits from qh (hmask) to the low ones", source="aprender#199, mlx#3664")
def high_bits_ignored(r: Any, case: Case) -> Iterator[Change]:
    """The quants' high bits are ignored, taken for all set, or inverted."""
    kind = _kind(r, case)
    if kind in WITH_HIGH_BITS:
        where = _field(kind, "qh")
        for name, to in {"ignores": 0, "takes for all set": 255}.items():
            says = f"{name} the high bits of {kind}'s quants"
            yield from _misread(r, case, lambda b, decode, to=to: decode(_changed(b, where, to)), says, name)  # type: ignore[misc]
        yield from _misread(
            r,
            case,
            lambda b, decode: decode(_changed(b, where, ~b[:, where])),
            f"inverts the high bits of {kind}'s quants",
            "not",
        )


@bug(
    *QUANTIZED,
    fix="bit j of qh belongs to value j of the low half, bit j + 16 to the high half",
    source="aprender#199, mlx#3664",
)
def high_bits_misplaced(r: Any, case: Case) -> Iterator[Change]:
    """The quants' high bits go to the wrong values."""
    kind = _kind(r, case)
    if kind not in WITH_HIGH_BITS:
        return
    where = _field(kind, "qh")

    def moved(change: Callable[[Array], Array]) -> Misread:
        return lambda blocks, decode: decode(_changed(blocks, where, change(blocks[:, where])))

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
        yield from _misread(r, case, moved(change), f"{says} ({kind})", says)


def _two_by_two(qh: Array) -> Array:
    """Value j of the two halves takes bits 2j and 2j + 1."""
    bits = np.unpackbits(qh, axis=1, bitorder="little").reshape(-1, 16, 2).swapaxes(1, 2)
    return np.packbits(bits.reshape(-1, 32), axis=1, bitorder="little")


def _reversed_bits(kind: str) -> Callable[[Array], Array]:
    """Fields within each byte in the opposite order: of two bits in Q6_K, of one elsewhere."""
    if kind == "Q6_K":
        return lambda q: (q << 6) | ((q & 12) << 2) | ((q & 48) >> 2) | (q >> 6)
    return lambda q: np.packbits(np.unpackbits(q, axis=1, bitorder="little"), axis=1)


@bug(*QUANTIZED, fix="subtract the (sub-)block's minimum (Q4_1 and Q5_1: add it)", source="aprender#199, mlx#3664")
def minima_wrong(r: Any, case: Case) -> Iterator[Change]:
    """The blocks' minima are ignored, have the wrong sign, or change places with the scales."""
    kind = _kind(r, case)
    if kind not in WITH_MINIMA:
        return
    m, d = _field(kind, "m"), _field(kind, "d")
    sign = "adds" if kind.endswith("K") else "subtracts"
    says = {
        "none": f"ignores {kind}'s minima", "sign": f"{sign} {kind}'s minima instead of the opposite",
        "swapped": f"swaps {kind}'s scale and minimum",
    }  # fmt: skip
    yield from _misread(r, case, lambda b, decode: decode(_changed(b, m, 0)), says["none"], "none")
    flip = np.array([0, 0x80], np.uint8)
    yield from _misread(r, case, lambda b, decode: decode(_changed(b, m, b[:, m] ^ flip)), says["sign"], "sign")
    swapped: Misread = lambda b, decode: decode(_changed(_changed(b, m, b[:, d]), d, b[:, m]))  # noqa: E731
    yield from _misread(r, case, swapped, says["swapped"], "swapped")


@bug(*QUANTIZED, fix="unpack the six-bit scales as ggml's get_scale_min_k4 does", source="aprender#199, mlx#3664")
def scales_misread(r: Any, case: Case) -> Iterator[Change]:
    """The K-quants' packed scales are unpacked wrongly: upper bits, order, sign, offset."""
    kind = _kind(r, case)
    if "scales" not in FIELDS.get(kind, {}):
        return
    where = _field(kind, "scales")
    for says, change in _scale_mistakes(kind).items():
        misread: Misread = lambda b, decode, change=change: decode(_changed(b, where, change(b[:, where])))  # type: ignore[misc]  # noqa: E731
        yield from _misread(r, case, misread, f"{says} ({kind})", says)
    if kind == "Q6_K":

        def unsigned(blocks: Array, decode: Decode) -> Array:
            scale = blocks[:, where].view(np.int8).astype(np.float32)
            with np.errstate(divide="ignore", invalid="ignore"):
                ratio = np.where(scale == 0, 1, (scale % 256) / scale)
            return (decode(blocks).reshape(-1, 16, 16) * ratio[..., None]).reshape(-1, 256)

        yield from _misread(r, case, unsigned, "reads Q6_K's scales as unsigned bytes", "unsigned")
    if kind == "Q3_K":
        ones = np.repeat(np.array([0x11, 0xAA], np.uint8), [8, 4])  # every scale 33: 1 once 32 is subtracted

        def biased(blocks: Array, decode: Decode) -> Array:
            quants = decode(_changed(blocks, where, ones)).reshape(-1, 16, 16)
            return (quants * _q3_scales(blocks[:, where])[..., None]).reshape(-1, 256)

        yield from _misread(r, case, biased, "does not subtract 32 from Q3_K's scales", "offset")


def _scale_mistakes(kind: str) -> dict[str, Callable[[Array], Array]]:
    if kind in ("Q4_K", "Q5_K"):
        return {
            "leaves out the upper bits of the last four scales and minima": lambda s: np.concatenate(
                [s[:, :8] & 63, s[:, 8:]], axis=1
            ),
            "swaps scales and minima of the sub-blocks": lambda s: _packed(*reversed(_unpacked(s))),
            "swaps the nibbles of the last four scales and minima": lambda s: np.concatenate(
                [s[:, :8], (s[:, 8:] << 4) | (s[:, 8:] >> 4)], axis=1
            ),
            "gives two neighbouring sub-blocks one scale: blocks of 64 for 32": lambda s: _packed(
                *(np.repeat(part[:, ::2], 2, axis=1) for part in _unpacked(s))
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


@bug(*QUANTIZED, fix="values of one K-quant byte are 32 (Q6_K: also 64) apart in the block, not neighbours")
def quants_linear(r: Any, case: Case) -> Iterator[Change]:
    """The two-bit fields of a byte (Q2_K, Q3_K) are taken for neighbouring values."""
    kind = _kind(r, case)
    if kind not in ("Q2_K", "Q3_K"):
        return
    where = _field(kind, "qs")

    def misread(blocks: Array, decode: Decode) -> Array:
        """Bytes as they would have to be for ggml's order to give what neighbours give."""
        two_bits = ((blocks[:, where][..., None] >> np.array([0, 2, 4, 6], np.uint8)) & 3).reshape(-1, 256)
        strided = two_bits.reshape(-1, 2, 4, 32).astype(np.uint8)
        qs = strided[:, :, 0] | strided[:, :, 1] << 2 | strided[:, :, 2] << 4 | strided[:, :, 3] << 6
        return decode(_changed(blocks, where, qs.reshape(-1, 64)))

    yield from _misread(r, case, misread, f"takes the four values of a {kind} byte for neighbours")


@bug(*QUANTIZED, fix="multiply by the block's scale d")
def scale_missing(r: Any, case: Case) -> Iterator[Change]:
    """The blocks' scale is left out, or read as bfloat16."""
    kind = _kind(r, case)
    if not kind:
        return
    where = _field(kind, "d")
    one = np.frombuffer(np.float16(1).tobytes(), np.uint8)
    yield from _misread(
        r, case, lambda b, decode: decode(_changed(b, where, one)), f"leaves out {kind}'s scale d", "none"
    )

    def as_bf16(blocks: Array, decode: Decode) -> Array:
        bits = np.ascontiguousarray(blocks[:, where]).view(np.uint16).astype(np.uint32) << 16
        d = _half(blocks, where)
        with np.errstate(all="ignore"):
            return decode(blocks) * np.where(d == 0, 1, bits.view(np.float32) / d)

    if kind in ("Q4_0", "Q5_0", "Q8_0", "Q3_K", "Q6_K"):
        yield from _misread(r, case, as_bf16, f"reads {kind}'s scale as bfloat16; it is float16", "bf16")


@bug(
    *QUANTIZED,
    fix="blocks hold 32 values (K-quants: 256) and follow one another without gaps",
    source="1bit-MONSTER#1234",
)
def block_size_wrong(r: Any, case: Case) -> Iterator[Change]:
    """The scale of a neighbouring block is used: the block size or the stride is wrong."""
    kind = _kind(r, case)
    if not kind or isinstance(r, Lookup):
        return
    where = _field(kind, "d")
    per_row = case.engine.w.shape(r.name)[-1] // case.engine.w.block_size(r.name)
    if per_row < 2:
        return

    def neighbour(shift: int) -> Misread:
        def misread(blocks: Array, decode: Decode) -> Array:
            rows = blocks[:, where].reshape(-1, per_row, 2)
            return decode(_changed(blocks, where, np.roll(rows, -shift, axis=1).reshape(-1, 2)))

        return misread

    def doubled(blocks: Array, decode: Decode) -> Array:
        rows = blocks[:, where].reshape(-1, per_row, 2)
        return decode(_changed(blocks, where, rows[:, np.arange(per_row) // 2 * 2].reshape(-1, 2)))

    n = case.engine.w.block_size(r.name)
    yield from _misread(r, case, doubled, f"takes every second scale: blocks of {2 * n} for {n} ({kind})", "double")
    yield from _misread(r, case, neighbour(1), f"scales each {kind} block by the next one's scale", "next")
    yield from _misread(r, case, neighbour(-1), f"scales each {kind} block by the one before's scale", "previous")


@bug(
    *QUANTIZED,
    fix="a tensor starts at data offset + its own offset; the data starts at a multiple of general.alignment",
    source="1bit-MONSTER#1234",
)
def tensor_offset_wrong(r: Any, case: Case) -> Iterator[Change]:
    """The tensor is read from the wrong place: off by a block, or by the alignment."""
    if not isinstance(r, Product) or r.decode is not None or r.chosen is not None or r.transposed:
        return
    w = case.engine.w
    raw = w.stored(r.name)
    size = FIELDS_SIZE.get(w.type(r.name), raw.dtype.itemsize)
    for shift in dict.fromkeys((32, -32, size, -size, 16, -16)):
        rows = w.stored_beside(r.name, shift)
        if rows is not None:
            says = f"reads {r.name} from {abs(shift)} bytes {'after' if shift > 0 else 'before'} its start"
            yield Change(Beside(r, rows), says, f"{shift:+d}")


class Beside:
    """A product by whatever lies beside a tensor in the file."""

    def __init__(self, product: Product, raw: Array) -> None:
        self.product, self.raw = product, raw

    def compute(self, case: Case) -> Array:
        r, w = self.product, case.engine.w
        x, *_ = case.carrier.operands(w.type(r.name), r.x)
        rows = self.raw if r.rows is None else self.raw[r.rows]
        rows = rows if case.channels is None else rows[case.channels]
        y = x @ w.decoded(r.name, rows).T
        bias = r.bias if r.bias is None or case.channels is None else r.bias[case.channels]
        return np.asarray(y if bias is None else y + bias)
