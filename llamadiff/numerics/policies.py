"""Policies: the arithmetics that a lane may have, and what each makes of an op's operands: decided here alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.numerics import arithmetic, cpu
from llamadiff.numerics.halves import round_bf16
from llamadiff.numerics.rounding import ROW, Rounding, noise
from llamadiff.numerics.types import HALF_STEP, HALVES

Array = NDArray[Any]

F32, NATIVE, F16, BF16 = "f32", "native", "f16", "bf16"
POLICIES = (F32, NATIVE, F16, BF16)
PERTURBED = ("jitter", "jitter 2", "jitter 3", "jitter 4")  # float32 on values that are perturbed by their own rounding
READ, READ_PERTURBED = "read", "read, shaken"  # roundings read back from a trace: without, and with their noise
# what unknown arithmetics may do to a span: to activations; to K and V; to all that attention does
COARSE, COARSE_CACHE, COARSE_ATTENTION = "8 bits", "4-bit cache", "16-bit attention"
MEASURING = (*PERTURBED, COARSE, COARSE_CACHE, COARSE_ATTENTION)  # float32, but for the noise that they measure

# Kinds of operands besides types of weights: a cache's rows, RoPE's angles, GELU's argument and value.
CACHES = CACHE_K, CACHE_V = "cache_k", "cache_v"
ANGLES, GGML_ANGLES, GELU = "angles", "ggml angles", "gelu"
IN_ATTENTION = ("ROPE", "SOFT_MAX")
MAY_ROUND = (*IN_ATTENTION, "SWIGLU", "GEGLU", "GELU", "GET_ROWS")  # ops of which a value may have 16 bits
_MADE = {ANGLES: GGML_ANGLES, GELU: arithmetic.GELU_TABLE}  # by ggml
_READS = {"kq": CACHE_K, "kqv": CACHE_V, "kqv_out": CACHE_V}  # products of attention
_LOOKS_UP = {"ROPE": ANGLES, "GEGLU": GELU, "GELU": GELU}

MOVED = 2.0**-7  # of a score: twice what bfloat16 does that cuts off, for that of the softmax's own sums
# what is cut off to 8 bits, and not rounded, errs as what is rounded to 7
_ROUGHLY, _ROUGHLY_KEPT = Rounding.to_bits(7, ROW), Rounding.to_bits(4, 32)


def operand_kind(word: str, op: str, weight_type: str | None = None) -> str | None:
    """The kind of a tap's operand, by its word and op: a cache, what is looked up, or else its weight's type."""
    return _READS.get(word) or _LOOKS_UP.get(op) or weight_type


def rounding_type(
    policy: str, kind: str, stored: Mapping[str, str], reading: Mapping[str, Rounding] | None = None, width: int = 0
) -> str:
    """What a policy rounds operands of a kind to, a key of ROUNDINGS or F32; for ANGLES, what makes them.

    ``stored``: the types of the cache, how the CPU rounds to eight bits (``q8``), adds float16's numbers (``sums``),
    and fills GELU's table (``gelu``). ``reading``: what policy READ does, to rows of a ``width`` if that is told apart.
    """
    if kind in _MADE:
        return arithmetic.as_cpu(_MADE[kind], stored.get(GELU, "")) if policy == NATIVE else "F32"
    if policy in (*MEASURING, *arithmetic.COMPUTES):
        return "F32" if policy in MEASURING or not cpu.PARTNER.get(kind, "").startswith("Q8") else policy
    if policy in (READ, READ_PERTURBED):
        read = _rounding_read(kind, reading, width)
        return read.base if read is not None else "F32"
    if policy == NATIVE:
        to = cpu.PARTNER.get(stored.get(kind, kind), "F32")
        to = "F32" if kind == CACHE_V and to not in HALVES else to  # quantized V is dequantized
        return arithmetic.as_cpu(to, stored.get("q8", cpu.AVX))
    return policy.upper()


def sums_of(policy: str, kind: str, stored: Mapping[str, str]) -> str:
    """How a policy adds products of operands of a kind: in float32, or as the CPU adds float16's numbers (``sums``)."""
    halves = policy == NATIVE and rounding_type(policy, kind, stored) == "F16"
    sums = stored.get("sums", cpu.IN_FLOAT) if halves else cpu.IN_FLOAT
    return cpu.IN_FLOAT if sums == cpu.UNKNOWN else sums


def _rounding_read(kind: str, reading: Mapping[str, Rounding] | None, width: int) -> Rounding | None:
    """What was read back of such operands, if anything was."""
    return reading.get(f"{kind}:{width}", reading.get(kind)) if reading else None


def operands(
    policy: str, kind: str, stored: Mapping[str, str], *parts: Array,
    reading: Mapping[str, Rounding] | None = None, edges: Sequence[int] = (),
) -> tuple[Array, ...]:  # fmt: skip
    """The operands of a product, or of GELU, as a policy has them: what it rounds, rounded; the others themselves.

    ``parts`` are activations; in attention Q and K, or probabilities and V. Of Q8_1 one more array follows: what it
    adds to the sum of each block's activations, [..., n / 32]. ``edges``: where batches of rows begin, and the end.
    """
    width = parts[0].shape[-1]
    to = rounding_type(policy, kind, stored, reading, width)
    sums = arithmetic.sums_beside(parts[0], to)
    stands = policy == NATIVE and stored.get(kind, to) != to  # a cache's rows are as they were stored
    rounds = [number == 0 or not stands for number in range(len(parts))]
    ties = policy == READ_PERTURBED and to.startswith(("Q8", "8 bits"))
    round_to = arithmetic.across_ties if ties else arithmetic.round_to
    parts = tuple(round_to(x, to, edges) if own else x for x, own in zip(parts, rounds, strict=True))
    read = _rounding_read(kind, reading, width) if policy == READ_PERTURBED else None
    if read is not None:
        parts = tuple(map(read.perturb, parts))
    return (*_perturb_operands(policy, kind, *parts), *sums)


def _perturb_operands(policy: str, kind: str, first: Array, *others: Array) -> tuple[Array, ...]:
    """Operands with the noise that a policy measures."""
    if policy == COARSE and kind not in CACHES:
        return _ROUGHLY.perturb(first), *others
    if policy == COARSE_CACHE and kind in CACHES:
        return first, *map(_ROUGHLY_KEPT.perturb, others)
    if policy == COARSE_ATTENTION and kind == CACHE_K:
        return first, *map(_scores_moved, others)
    if policy == COARSE_ATTENTION and kind == CACHE_V:
        return tuple(map(round_bf16, (first, *others)))
    return first, *others


def _scores_moved(keys: Array) -> Array:
    """Keys [..., d], each times a factor of its own: their scores move as where they are kept in bfloat16."""
    factors = np.random.default_rng(0).uniform(-MOVED, MOVED, (*keys.shape[:-1], 1))
    return np.asarray(keys * (1 + factors), keys.dtype)


def kept_rows(
    policy: str, kind: str, stored: Mapping[str, str], rows: Array, reading: Mapping[str, Rounding] | None = None
) -> Array:
    """Rows as a cache keeps them: rounded to its type."""
    to = arithmetic.as_cpu(stored.get(kind, "F32"), stored.get("q8", cpu.AVX))
    read = _rounding_read(kind.replace("cache", "kept"), reading, 0) if policy == READ_PERTURBED else None
    rows = arithmetic.round_to(rows, to)
    return rows if read is None else read.perturb(rows)


def perturb(values: Array, kept: str, draw: int = 0) -> Array:
    """Values moved at random by up to half a step of what they are kept in."""
    if values.dtype.kind != "f":
        return values
    return np.asarray(values * (1 + noise(values, HALF_STEP[kept], draw)), values.dtype)
