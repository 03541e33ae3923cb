"""Decoders of eleven block types, each written from the format alone, which make a known mistake when they are told to.

Blocks are [rows, blocks, bytes]; a decoder gives their values [rows, blocks, values].
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from llamaref import Weights

Array = np.ndarray
LEGACY, K_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"), ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
NIBBLES, HIGH_BITS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K"), ("Q5_0", "Q5_1", "Q3_K", "Q5_K", "Q6_K")
MINIMA, ONE_SCALE = ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K"), ("Q4_0", "Q5_0", "Q8_0", "Q3_K", "Q6_K")

# cause -> what is done wrongly -> the types where it can be
MISTAKES: dict[str, dict[str, tuple[str, ...]]] = {
    "nibbles-interleaved": {
        "nibbles are neighbours": (*NIBBLES, "Q6_K", "MXFP4"),
        "nibbles and high bits are neighbours": ("Q5_0", "Q5_1"),
        "quants in the order of bytes": ("Q5_K", "Q6_K"),
    },
    "quants-order": {
        "nibbles 128 apart": ("Q4_K", "Q5_K", "Q6_K"),
        "nibbles 16 apart": ("Q4_K", "Q5_K", "Q6_K"),
        "nibbles 4 apart": ("Q4_0", "Q4_1", "MXFP4"),
        "fields from the other end": ("Q2_K", "Q3_K"),
        "fields 64 apart": ("Q2_K", "Q3_K"),
    },
    "nibbles-swapped": {"nibbles swapped": (*NIBBLES, "Q6_K")},
    "quants-offset": {
        "nothing subtracted": ("Q4_0", "Q5_0", "Q3_K", "Q6_K"),
        "two's complement": ("Q4_0",),
        "unsigned": ("Q8_0",),
    },
    "high-bits-ignored": {
        "high bits zero": HIGH_BITS,
        "high bits set": HIGH_BITS,
        "high bits inverted": HIGH_BITS,
    },
    "high-bits-misplaced": {
        "first half's high bits for both": ("Q5_0", "Q5_1"),
        "halves of the high bits swapped": ("Q5_0", "Q5_1", "Q5_K", "Q6_K"),
        "high bits from the other end": ("Q5_K", "Q6_K"),
        "high bits in the order of bytes": ("Q3_K", "Q5_K", "Q6_K"),
    },
    "minima-wrong": {"minima ignored": MINIMA, "minima's sign": MINIMA, "d and minimum swapped": MINIMA},
    "scales-misread": {
        "upper bits of scales left out": ("Q3_K", "Q4_K", "Q5_K"),
        "scales and minima swapped": ("Q2_K", "Q4_K", "Q5_K"),
        "scales in a row": ("Q2_K", "Q3_K", "Q4_K", "Q5_K"),
        "scales in a row from the highest bit": ("Q3_K", "Q4_K", "Q5_K"),
        "scales and minima in turn": ("Q4_K", "Q5_K"),
        "last scales' nibbles swapped": ("Q4_K", "Q5_K"),
        "scales unsigned": ("Q6_K",),
        "32 not subtracted from scales": ("Q3_K",),
        "one scale for two sub-blocks": ("Q2_K", "Q4_K", "Q5_K", "Q6_K"),
    },
    "quants-linear": {"fields are neighbours": ("Q2_K", "Q3_K")},
    "scale-missing": {"d left out": LEGACY, "d as bfloat16": ONE_SCALE},
    "block-size-wrong": {
        "d of the next block": (*LEGACY, *K_TYPES),
        "d of the block before": (*LEGACY, *K_TYPES),
        "d of every other block": (*LEGACY, *K_TYPES),
    },
    "tensor-offset-wrong": {"32 bytes late": (*LEGACY, *K_TYPES), "one block late": (*LEGACY, *K_TYPES)},
}


def decode(kind: str, rows: Array, mistake: str | None = None) -> Array:
    """Bytes [rows, bytes] -> float32 [rows, values]."""
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    with np.errstate(all="ignore"):  # what is no scale may be anything
        values = DECODERS[kind](rows.reshape(len(rows), -1, size), mistake)
    return values.reshape(len(rows), -1).astype(np.float32, copy=False)


def q4_0(blocks: Array, mistake: str | None) -> Array:
    """d, 16 bytes of nibbles: d * (q - 8)."""
    q = _nibbles_of(blocks[..., 2:18], 16, mistake)
    if mistake == "two's complement":
        return _d(blocks, 0, mistake) * np.where(q < 8, q, q - 16)
    return _d(blocks, 0, mistake) * (q - _offset(8, mistake))


def q4_1(blocks: Array, mistake: str | None) -> Array:
    """d, m, 16 bytes of nibbles: d * q + m."""
    d, m = _d_and_minimum(blocks, 0, mistake)
    return d * _nibbles_of(blocks[..., 4:20], 16, mistake) + m


def q5_0(blocks: Array, mistake: str | None) -> Array:
    """d, 4 bytes of high bits, 16 bytes of nibbles: d * (q - 16)."""
    q = _five_bits(blocks[..., 2:6], blocks[..., 6:22], mistake)
    return _d(blocks, 0, mistake) * (q - _offset(16, mistake))


def q5_1(blocks: Array, mistake: str | None) -> Array:
    """d, m, 4 bytes of high bits, 16 bytes of nibbles: d * q + m."""
    d, m = _d_and_minimum(blocks, 0, mistake)
    return d * _five_bits(blocks[..., 4:8], blocks[..., 8:24], mistake) + m


def q8_0(blocks: Array, mistake: str | None) -> Array:
    """d, 32 signed bytes: d * q."""
    q = np.ascontiguousarray(blocks[..., 2:34])
    return _d(blocks, 0, mistake) * (q if mistake == "unsigned" else q.view(np.int8))


def q2_k(blocks: Array, mistake: str | None) -> Array:
    """16 bytes of scale and minimum, 64 bytes of two-bit fields, d, dmin: d * scale * q - dmin * minimum."""
    d, dmin = _d_and_minimum(blocks, 80, mistake)
    scale, minimum = blocks[..., :16] & 15, blocks[..., :16] >> 4
    if mistake == "scales and minima swapped":
        scale, minimum = minimum, scale
    if mistake == "scales in a row":
        scale, minimum = (_every_nibble(blocks[..., at : at + 8]) for at in (0, 8))
    scale, minimum = _sub_blocks(scale, 16, mistake), _sub_blocks(minimum, 16, mistake)
    return d * scale * _two_bits(blocks[..., 16:80], mistake) - dmin * minimum


def q3_k(blocks: Array, mistake: str | None) -> Array:
    """32 bytes of high bits, 64 bytes of two-bit fields, 12 bytes of scales, d: d * (scale - 32) * (q - 4)."""
    high = _wrong_bits(_bits_by_32(blocks[..., :32], mistake), mistake)
    if mistake == "high bits in the order of bytes":
        high = np.unpackbits(blocks[..., :32], axis=-1, bitorder="little").astype(np.int16)
    q = _two_bits(blocks[..., 32:96], mistake) + 4 * high - _offset(4, mistake)
    packed = blocks[..., 96:108]
    scale = np.concatenate([packed[..., :8] & 15, packed[..., :8] >> 4], axis=-1).astype(np.int16)
    if mistake != "upper bits of scales left out":
        scale = scale + 16 * _fields(packed[..., 8:12], (0, 2, 4, 6)).reshape(scale.shape)
    scale = _six_bits(packed, mistake) if _is_row(mistake) else scale
    if mistake != "32 not subtracted from scales":
        scale = scale - 32
    return _d(blocks, 108, mistake) * _sub_blocks(scale, 16, mistake) * q


def q4_k(blocks: Array, mistake: str | None) -> Array:
    """d, dmin, 12 bytes of scales and minima, 128 bytes of nibbles: d * scale * q - dmin * minimum."""
    d, dmin = _d_and_minimum(blocks, 0, mistake)
    scale, minimum = _scales_and_minima(blocks[..., 4:16], mistake)
    return d * scale * _nibbles_of(blocks[..., 16:144], 32, mistake) - dmin * minimum


def q5_k(blocks: Array, mistake: str | None) -> Array:
    """d, dmin, 12 bytes of scales and minima, 32 of high bits, 128 of nibbles: d * scale * q - dmin * minimum."""
    d, dmin = _d_and_minimum(blocks, 0, mistake)
    scale, minimum = _scales_and_minima(blocks[..., 4:16], mistake)
    high = _bits_by_32(blocks[..., 16:48], mistake)
    if mistake == "nibbles are neighbours":  # a quant is moved whole
        high = _alternating(high.reshape(*high.shape[:-1], 4, 64)).reshape(high.shape)
    if mistake in {"quants in the order of bytes", "high bits in the order of bytes"}:
        high = np.unpackbits(blocks[..., 16:48], axis=-1, bitorder="little").astype(np.int16)
    q = _nibbles_of(blocks[..., 48:176], 32, mistake) + 16 * _wrong_bits(high, mistake)
    return d * scale * q - dmin * minimum


def q6_k(blocks: Array, mistake: str | None) -> Array:
    """128 bytes of low nibbles, 64 of two high bits, 16 signed scales, d: d * scale * (q - 32)."""
    shape = blocks.shape[:-1]
    low = _nibbles_of(blocks[..., :128], 64, mistake)
    qh = blocks[..., 128:192]
    if mistake == "halves of the high bits swapped":
        qh = _halves_swapped(qh)
    shifts = (6, 4, 2, 0) if mistake == "high bits from the other end" else (0, 2, 4, 6)
    high = _fields(qh.reshape(*shape, 2, 32), shifts).reshape(*shape, 256)
    if mistake in {"quants in the order of bytes", "high bits in the order of bytes"}:
        high = np.stack([qh >> shift & 3 for shift in shifts], axis=-1).reshape(*shape, 256).astype(np.int16)
    high = _wrong_bits(high, mistake, highest=3)
    scale = np.ascontiguousarray(blocks[..., 192:208])
    scale = _sub_blocks(scale if mistake == "scales unsigned" else scale.view(np.int8), 16, mistake)
    return _d(blocks, 208, mistake) * scale * (low + 16 * high - _offset(32, mistake))


def mxfp4(blocks: Array, mistake: str | None) -> Array:
    """A byte of exponent, 16 bytes of nibbles: 2^(e - 127) * the float of four bits that each nibble is."""
    scale = 2.0 ** (blocks[..., :1].astype(np.int32) - 127)
    floats = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    return scale * np.concatenate([floats, -floats])[_nibbles_of(blocks[..., 1:17], 16, mistake)]


DECODERS: dict[str, Callable[[Array, str | None], Array]] = {
    "Q4_0": q4_0, "Q4_1": q4_1, "Q5_0": q5_0, "Q5_1": q5_1, "Q8_0": q8_0,
    "Q2_K": q2_k, "Q3_K": q3_k, "Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k,
    "MXFP4": mxfp4,
}  # fmt: skip


def _half(blocks: Array, at: int) -> Array:
    """The float16 at a byte of every block: [rows, blocks, 1]."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16).astype(np.float32)


def _d(blocks: Array, at: int, mistake: str | None) -> Array:
    """The scale of every block: [rows, blocks, 1]."""
    d = _half(blocks, at)
    if mistake == "d left out":
        return np.ones_like(d)
    if mistake == "d as bfloat16":
        halves = np.ascontiguousarray(blocks[..., at : at + 2]).view(np.uint16)
        return (halves.astype(np.uint32) << 16).view(np.float32)
    if mistake == "d of the next block":
        return np.roll(d, -1, axis=1)
    if mistake == "d of the block before":
        return np.roll(d, 1, axis=1)
    if mistake == "d of every other block":
        return d[:, np.arange(d.shape[1]) // 2 * 2]
    return d


def _d_and_minimum(blocks: Array, at: int, mistake: str | None) -> tuple[Array, Array]:
    """d, and after it m or dmin: [rows, blocks, 1] each."""
    d, minimum = _d(blocks, at, mistake), _half(blocks, at + 2)
    if mistake == "minima ignored":
        return d, np.zeros_like(minimum)
    if mistake == "minima's sign":
        return d, -minimum
    if mistake == "d and minimum swapped":
        return minimum, d
    return d, minimum


def _nibbles(qs: Array, mistake: str | None) -> Array:
    """The low nibbles of all bytes, then the high ones: [..., n] -> [..., 2 * n]."""
    low, high = (qs & 15).astype(np.int16), (qs >> 4).astype(np.int16)
    if mistake == "nibbles swapped":
        low, high = high, low
    values = np.concatenate([low, high], axis=-1)
    neighbours = mistake in {
        "nibbles are neighbours", "nibbles and high bits are neighbours", "quants in the order of bytes"
    }  # fmt: skip
    return _alternating(values) if neighbours else values


def _nibbles_of(qs: Array, size: int, mistake: str | None) -> Array:
    """So many bytes at a time hold twice as many values: [..., n] -> [..., 2 * n]."""
    shape = qs.shape[:-1]
    size = {"nibbles 128 apart": 128, "nibbles 16 apart": 16, "nibbles 4 apart": 4}.get(str(mistake), size)
    return _nibbles(qs.reshape(*shape, -1, size), mistake).reshape(*shape, -1)


def _five_bits(qh: Array, qs: Array, mistake: str | None) -> Array:
    """Nibbles, and value i's fifth bit, which is bit i of qh: [..., 32]."""
    high = np.unpackbits(qh, axis=-1, bitorder="little").astype(np.int16)
    if mistake == "first half's high bits for both":
        high = np.concatenate([high[..., :16], high[..., :16]], axis=-1)
    if mistake == "halves of the high bits swapped":
        high = _halves_swapped(high)
    if mistake == "nibbles and high bits are neighbours":
        high = _alternating(high)
    return _nibbles(qs, mistake) + 16 * _wrong_bits(high, mistake)


def _bits_by_32(qh: Array, mistake: str | None) -> Array:
    """Bit g of byte l belongs to value 32 * g + l: [..., 32] -> [..., 256]."""
    if mistake == "halves of the high bits swapped":
        qh = _halves_swapped(qh)
    order = range(7, -1, -1) if mistake == "high bits from the other end" else range(8)
    return np.concatenate([qh >> bit & 1 for bit in order], axis=-1).astype(np.int16)


def _wrong_bits(high: Array, mistake: str | None, highest: int = 1) -> Array:
    """High bits as they are read; ``highest`` is all of them set."""
    if mistake == "high bits zero":
        return np.zeros_like(high)
    if mistake == "high bits set":
        return np.full_like(high, highest)
    return highest - high if mistake == "high bits inverted" else high


def _two_bits(qs: Array, mistake: str | None) -> Array:
    """32 bytes at a time hold 128 values, field by field: [..., 64] -> [..., 256]."""
    shape = qs.shape[:-1]
    if mistake == "fields are neighbours":
        return np.stack([qs >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1).reshape(*shape, 256).astype(np.int16)
    shifts = (6, 4, 2, 0) if mistake == "fields from the other end" else (0, 2, 4, 6)
    apart = 64 if mistake == "fields 64 apart" else 32
    return _fields(qs.reshape(*shape, -1, apart), shifts).reshape(*shape, 256)


def _fields(values: Array, shifts: tuple[int, ...]) -> Array:
    """A two-bit field of all bytes, then the next one: [..., n] -> [..., 4 * n]."""
    return np.concatenate([values >> shift & 3 for shift in shifts], axis=-1).astype(np.int16)


def _scales_and_minima(packed: Array, mistake: str | None) -> tuple[Array, Array]:
    """Eight scales and eight minima of six bits in 12 bytes; the last four of each in two parts: [..., 256] each."""
    a, b, c = packed[..., :4], packed[..., 4:8], packed[..., 8:12]
    late_scale, late_minimum = c & 15, c >> 4
    if mistake == "last scales' nibbles swapped":
        late_scale, late_minimum = late_minimum, late_scale
    if mistake != "upper bits of scales left out":
        late_scale, late_minimum = late_scale | a >> 6 << 4, late_minimum | b >> 6 << 4
    scale = np.concatenate([a & 63, late_scale], axis=-1)
    minimum = np.concatenate([b & 63, late_minimum], axis=-1)
    if mistake == "scales and minima swapped":
        scale, minimum = minimum, scale
    if _is_row(mistake):
        scale, minimum = np.split(_six_bits(packed, mistake), 2, axis=-1)
    if mistake == "scales and minima in turn":
        row = _six_bits(packed, mistake)
        scale, minimum = row[..., ::2], row[..., 1::2]
    return _sub_blocks(scale, 32, mistake), _sub_blocks(minimum, 32, mistake)


def _is_row(mistake: str | None) -> bool:
    return mistake in {"scales in a row", "scales in a row from the highest bit"}


def _six_bits(packed: Array, mistake: str | None) -> Array:
    """Twelve bytes as sixteen numbers of six bits, one after the other: four in each three bytes."""
    end = "big" if mistake == "scales in a row from the highest bit" else "little"
    threes = packed.reshape(*packed.shape[:-1], 4, 3).astype(np.int32)
    weights = 256 ** (np.arange(3)[::-1] if end == "big" else np.arange(3))
    whole = (threes * weights).sum(axis=-1)[..., None]
    shifts = np.array([18, 12, 6, 0] if end == "big" else [0, 6, 12, 18])
    return (whole >> shifts & 63).reshape(*packed.shape[:-1], 16).astype(np.int16)


def _every_nibble(field: Array) -> Array:
    """Each byte's low nibble and high one as neighbours: [..., n] -> [..., 2 * n]."""
    return np.stack([field & 15, field >> 4], axis=-1).reshape(*field.shape[:-1], -1).astype(np.int16)


def _sub_blocks(scales: Array, size: int, mistake: str | None) -> Array:
    """A scale for each value of its sub-block, float32: [..., n] -> [..., n * size]."""
    if mistake == "one scale for two sub-blocks":
        scales = np.repeat(scales[..., ::2], 2, axis=-1)
    return np.repeat(scales.astype(np.float32), size, axis=-1)


def _offset(value: int, mistake: str | None) -> int:
    return 0 if mistake == "nothing subtracted" else value


def _alternating(values: Array) -> Array:
    """Values of the first half and of the second half in turn."""
    return np.stack(np.split(values, 2, axis=-1), axis=-1).reshape(values.shape)


def _halves_swapped(values: Array) -> Array:
    return np.roll(values, values.shape[-1] // 2, axis=-1)


class Misread(Weights):
    """A model's weights, of which those whose name ends in ``which`` are misread."""

    def __init__(self, path: Path, which: str, mistake: str) -> None:
        super().__init__(path)
        self.which, self.mistake = which, mistake
        self.file, self.places = path, {tensor.name: tensor.data_offset for tensor in gguf.GGUFReader(path).tensors}

    def product(self, name: str, x: Array, *args: Any, **options: Any) -> Array:
        if not name.endswith(self.which):
            return super().product(name, x, *args, **options)
        self.read.add(name)
        with np.errstate(all="ignore"):
            return x @ self.misread(name).T

    def rows(self, name: str, indices: Array) -> Array:
        if not name.endswith(self.which):
            return super().rows(name, indices)
        self.read.add(name)
        return self.misread(name)[indices]

    def misread(self, name: str) -> Array:
        kind, stored = self.type(name), self.read_raw(name)
        block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
        late = {"32 bytes late": 32, "one block late": block}.get(self.mistake, 0)
        found = np.fromfile(self.file, np.uint8, stored.size, offset=self.places[name] + late)
        return decode(kind, found.reshape(stored.shape), self.mistake)


class Everywhere(Misread):
    """A model's weights, of which all matrices of a type are misread; rows of the embedding are right."""

    def __init__(self, path: Path, kind: str, mistake: str) -> None:
        super().__init__(path, ".weight", mistake)
        self.kind = kind

    def product(self, name: str, x: Array, *args: Any, **options: Any) -> Array:
        reading = Misread if self.type(name) == self.kind else Weights
        return reading.product(self, name, x, *args, **options)

    def rows(self, name: str, indices: Array) -> Array:
        return Weights.rows(self, name, indices)
