"""How products are carried out: the roundings of activations that are legal for a type of weights.

ggml multiplies quantized weights by activations that it first rounds to the weight type's partner
(``vec_dot_type`` in ggml-cpu.c); other engines use float32, float16 or bfloat16. Each policy is one
consistent way through a whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from llamaref.in_cache import by_rows
from llamaref.weights import block_sizes, requantize
from numpy.typing import NDArray

from llamadiff.numerics.compiled.decoder import rounded_to_q8_k
from llamadiff.numerics.cpu import FUSED, NEON, PLAIN
from llamadiff.numerics.eight_bits import q8_1_sums, round_q8_0
from llamadiff.numerics.halves import round_bf16, round_f16
from llamadiff.numerics.rounding import ROW, TENSOR

Array = NDArray[Any]

SAMPLE = 4096  # values of a tensor that are looked at first
BLOCK, TIE = 32, 2.0**-20  # values that share a step in any rounding to 8 bits; how near a tie is to the middle
GLANCE, FINE = 16, 0x1FFF  # values that are looked at before; bits that neither f16 nor bf16 has


def round_q8_k(x: Array, fused: bool = False) -> Array:
    """Through ggml's Q8_K: blocks of 256, scale -127 / (the value of largest magnitude), in float32.

    ``fused``: a value times the scale is not rounded to float32 before it is to a whole number.
    """
    blocks = np.ascontiguousarray(x, np.float32).reshape(-1, 256)
    peak = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)
    with np.errstate(divide="ignore"):
        inverse = np.where(peak != 0, np.float32(-127) / peak, np.float32(0))
        scale = np.where(inverse != 0, np.float32(1) / inverse, np.float32(0))
    quants = blocks * (inverse.astype(np.float64) if fused else inverse)  # up to 127: none is larger than the peak
    np.rint(quants, out=quants)
    quants = quants.astype(np.float32, copy=False)
    quants *= scale
    return np.asarray(quants.reshape(x.shape), x.dtype)


LARGEST = 256  # values in a block: rows of a multiple are whole blocks of any type
GELU_TABLE = "ggml GELU table"
GELU_END = 10.0  # from here on ggml asks no table: GELU is x, or 0 (ggml-cpu/vec.h)


def round_in_table(x: Array) -> Array:
    """As ggml's table of GELU has arguments and values: in float16, but only between its ends."""
    return np.asarray(np.where(np.abs(x) < GELU_END, round_f16(x), x))


# GELU of -1.9990234375 in float32, so near the middle of two numbers of float16 that ggml's table has the one or the
# other by whether it was filled with a fused product and sum. No other value of it is so near (tests/numerics).
_GELU_MIDDLE, _GELU_FUSED = np.float32(-0.04548640176653862), np.float32(-0.045501708984375)


def round_in_fused_table(x: Array) -> Array:
    """The same, of a ggml that is compiled for a CPU which fuses a product and a sum (FMA)."""
    return np.where(x == _GELU_MIDDLE, x.dtype.type(_GELU_FUSED), round_in_table(x))


ROUNDINGS: dict[str, Callable[[Array], Array]] = {
    GELU_TABLE: round_in_table,
    f"{GELU_TABLE} {FUSED}": round_in_fused_table,
    "F16": round_f16,
    "BF16": round_bf16,
    "Q8_0": round_q8_0,
    "Q8_1": round_q8_0,
    "Q8_K": round_q8_k,
    f"Q8_K {FUSED}": partial(round_q8_k, fused=True),
    "Q4_0": partial(requantize, "Q4_0"),  # as gguf-py makes it, bit for bit as ggml
    "Q5_0": partial(requantize, "Q5_0"),
    **{f"{kind} {way}": partial(round_q8_0, way=way) for kind in ("Q8_0", "Q8_1") for way in (NEON, PLAIN)},
}


def round_blocks(x: Array, size: int, whole: Callable[[Array], Array] = np.rint, half: bool = False) -> Array:
    """Blocks of ``size`` (ROW, TENSOR; a row if it is no multiple) through 8 bits; scales in float16 if ``half``."""
    n = x.size if size == TENSOR else x.shape[-1]
    blocks = x.reshape(-1, size if size > 0 and n % size == 0 else max(1, n))
    scale = np.abs(blocks).max(axis=-1, keepdims=True) / x.dtype.type(127)
    quants = whole(np.divide(blocks, scale, where=scale > 0, out=np.zeros_like(blocks)))
    return np.asarray(quants * (round_f16(scale) if half else scale), x.dtype).reshape(x.shape)


def round_between(x: Array, whole_zero: bool = True) -> Array:
    """Each row through 255 steps between its smallest and its largest value; zero is one of them if it is whole."""
    low, high = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
    step = np.maximum(high - low, np.finfo(x.dtype).tiny) / x.dtype.type(255)
    if not whole_zero:
        return np.asarray(np.rint((x - low) / step) * step + low, x.dtype)
    zero = np.rint(-low / step)
    return np.asarray((np.clip(np.rint(x / step) + zero, 0, 255) - zero) * step, x.dtype)


# Ways of other engines to round activations to 8 bits, by what they do.
EIGHT_BITS: dict[str, Callable[[Array], Array]] = {
    "8 bits, one scale a row": partial(round_blocks, size=ROW),
    "8 bits, one scale and zero a row": round_between,
    "8 bits, one scale and minimum a row": lambda x: round_between(x, whole_zero=False),
    **{f"8 bits, one float32 scale for {n}": partial(round_blocks, size=n) for n in (32, 64, 128, 256)},
    "8 bits by truncation, one float32 scale for 32": partial(round_blocks, size=32, whole=np.trunc),
    "8 bits, one scale for the tensor": partial(round_blocks, size=TENSOR),
}
HALF_SCALES: dict[str, Callable[[Array], Array]] = {
    f"8 bits, one float16 scale {of}": partial(round_blocks, size=n, half=True)
    for of, n in {"a row": ROW, "for the tensor": TENSOR, **{f"for {n}": n for n in (32, 64, 128, 256)}}.items()
}
COMPUTES = EIGHT_BITS | HALF_SCALES  # what an engine may say that it rounds activations to, besides 16 bits
ROUNDINGS |= COMPUTES
_SAME = "8 bits, one float16 scale for 32"  # as Q8_0
EIGHT_BIT_WAYS = {kind: ROUNDINGS[kind] for kind in ("Q8_0", "Q8_K", *COMPUTES) if kind != _SAME}  # ggml's first


def round_to(x: Array, to: str, edges: Sequence[int] = ()) -> Array:
    """Values through a rounding, a key of ROUNDINGS; as they are through any other type.

    ``edges``: where batches of rows begin, and the end: what has one scale for the tensor has one for each of them.
    """
    if to not in ROUNDINGS:
        return x
    fast = rounded_to_q8_k(x) if to == "Q8_K" else None
    if fast is not None:
        return fast.astype(x.dtype, copy=False)
    if to.endswith("the tensor"):
        return np.concatenate([ROUNDINGS[to](part) for part in np.split(x, edges[1:-1]) if len(part)])
    return by_rows(ROUNDINGS[to], x) if x.ndim and x.shape[-1] % LARGEST == 0 else ROUNDINGS[to](x)


def across_ties(x: Array, to: str, edges: Sequence[int] = ()) -> Array:
    """Rounded values [..., n], those the other way that lie in the middle of two steps but for float32's own error."""
    gap = x - round_to(x, to, edges)
    size = np.abs(gap).reshape(*x.shape[:-1], -1, BLOCK if x.shape[-1] % BLOCK == 0 else x.shape[-1])
    halves = (size > 0.9 * size.max(axis=-1, keepdims=True)).reshape(x.shape)  # a block's largest value is no tie
    return round_to(np.where(halves, x + np.copysign(x * x.dtype.type(TIE), gap), x), to, edges)


def sums_beside(x: Array, to: str) -> tuple[Array, ...]:
    """``q8_1_sums``, if that is what values are rounded to; no other rounding has any."""
    return (q8_1_sums(x, to.partition(" ")[2]),) if to.startswith("Q8_1") else ()


def fits_blocks(width: int, kind: str) -> bool:
    """Whether rows of a width are whole blocks of a type."""
    return width % block_sizes(kind)[0] == 0


def as_cpu(kind: str, way: str) -> str:
    """The rounding to a type as a CPU carries it out in its ``way`` (cpu.Q8_WAYS): a key of ROUNDINGS."""
    parts = way.split(", ")
    return next((key for part in parts if (key := f"{kind} {part}") in ROUNDINGS), kind)


def precision(x: Array) -> str:
    """The coarsest of bf16, f16, f32 that holds every value exactly: what a tap was really kept in."""
    values = np.ascontiguousarray(x, np.float32).reshape(-1)
    first = values[:GLANCE]
    if (first.view(np.uint32) & np.uint32(FINE)).any() and np.isfinite(first).all():
        return "f32"  # as most are, at a glance
    found = "bf16"
    for some in (values[:SAMPLE], values):  # most tensors show it at once
        if found == "bf16" and (some.view(np.uint32) & np.uint32(0xFFFF)).any():
            found = "f16"
        if found == "f16" and not np.array_equal(round_f16(some), some, equal_nan=True):
            return "f32"
    return found
