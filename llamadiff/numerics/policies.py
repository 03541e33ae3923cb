"""Policies: the arithmetics that a lane may have, and what each rounds an op's operands to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.numerics import arithmetic
from llamadiff.numerics.rounding import Rounding, noise

Array = NDArray[Any]

F32, NATIVE, F16, BF16 = "f32", "native", "f16", "bf16"
POLICIES = (F32, NATIVE, F16, BF16)
JITTERS = ("jitter", "jitter 2", "jitter 3", "jitter 4")  # float32 on values that are shaken by their own rounding
READ, READ_SHAKEN = "read", "read, shaken"  # roundings read back from a trace: without, and with their noise
# what unknown arithmetics may do to a span: to activations; to K and V; to all that attention does
ROUGH, ROUGH_CACHE, ROUGH_ATTENTION = "8 bits", "4-bit cache", "16-bit attention"
ANGLES, GGML_ANGLES = "angles", "ggml angles"
MEASURING = (*JITTERS, ROUGH, ROUGH_CACHE, ROUGH_ATTENTION)  # policies that are float32 but for the noise they measure
GELU = "gelu"


def rounding_type(
    policy: str, kind: str, stored: Mapping[str, str], reading: Mapping[str, Rounding] | None = None
) -> str:
    """The type that activations are rounded to before a product with weights (or a cache) of type ``kind``.

    ``reading``: what policy READ does. Also what makes RoPE's angles (``kind`` ANGLES), and what GELU's argument and
    value are rounded to (GELU).
    """
    if kind == ANGLES:
        return GGML_ANGLES if policy == NATIVE else "F32"
    if kind == GELU:
        return arithmetic.GELU_TABLE if policy == NATIVE else "F32"
    if policy in MEASURING:
        return "F32"
    if policy in (READ, READ_SHAKEN):
        return reading[kind].base if reading and kind in reading else "F32"
    if policy == NATIVE:
        to = arithmetic.PARTNER.get(stored.get(kind, kind), "F32")
        to = "F32" if kind == "cache_v" and to not in ("F16", "BF16") else to  # quantized V is dequantized
        return arithmetic.as_cpu(to, stored.get("q8", arithmetic.AVX))
    return policy.upper()


def shaken(values: Array, kept: str, draw: int = 0) -> Array:
    """Values moved at random by up to half a step of what they are kept in."""
    if values.dtype.kind != "f":
        return values
    step = {F32: 2.0**-24, F16: 2.0**-11, BF16: 2.0**-8}[kept]
    return np.asarray(values * (1 + noise(values, step, draw)), values.dtype)
