"""Where the fields of a block lie, for every type of blocks (ggml-common.h): the one table of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from llamaref.weights import block_sizes, decode
from numpy.typing import NDArray

Array = NDArray[Any]

# d is the scale, m the minimum (dmin), e a power of two, qs the quants' low bits (ql), qh their high bits (hmask).
FIELDS: Mapping[str, Mapping[str, tuple[int, int]]] = {
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
    "IQ4_NL": {"d": (0, 2), "qs": (2, 18)},
    "IQ4_XS": {"d": (0, 2), "scales_h": (2, 4), "scales_l": (4, 8), "qs": (8, 136)},
    "IQ1_S": {"d": (0, 2), "qs": (2, 34), "qh": (34, 50)},
    "IQ1_M": {"qs": (0, 32), "qh": (32, 48), "scales": (48, 56)},
    "IQ2_XXS": {"d": (0, 2), "qs": (2, 66)},
    "IQ2_XS": {"d": (0, 2), "qs": (2, 66), "scales": (66, 74)},
    "IQ2_S": {"d": (0, 2), "qs": (2, 34), "signs": (34, 66), "qh": (66, 74), "scales": (74, 82)},
    "IQ3_XXS": {"d": (0, 2), "qs": (2, 66), "scales": (66, 98)},
    "IQ3_S": {"d": (0, 2), "qs": (2, 66), "qh": (66, 74), "signs": (74, 106), "scales": (106, 110)},
    "TQ1_0": {"qs": (0, 48), "qh": (48, 52), "d": (52, 54)},
    "TQ2_0": {"qs": (0, 64), "d": (64, 66)},
    "Q1_0": {"d": (0, 2), "qs": (2, 18)},
    "MXFP4": {"e": (0, 1), "qs": (1, 17)},
    "NVFP4": {"e": (0, 4), "qs": (4, 36)},
    "F16": {"values": (0, 2)},
    "BF16": {"values": (0, 2)},
}
HALVES = ("d", "m")  # fields that are one float16

# How elements lie in a field (ggml-quants.c): bits of each, and the run of bytes whose lowest parts come first, then
# the next ones. Q4_K's (4, 32): byte j of each 32 has value j of each 64 in its low nibble, j + 32 in the high one.
PACKED: Mapping[str, Mapping[str, tuple[int, int]]] = {
    "Q4_0": {"qs": (4, 16)},
    "Q4_1": {"qs": (4, 16)},
    "Q5_0": {"qs": (4, 16), "qh": (1, 1)},
    "Q5_1": {"qs": (4, 16), "qh": (1, 1)},
    "Q2_K": {"scales": (4, 16), "qs": (2, 32)},
    "Q3_K": {"qs": (2, 32), "qh": (1, 32)},
    "Q4_K": {"qs": (4, 32)},
    "Q5_K": {"qs": (4, 32), "qh": (1, 32)},
    "Q6_K": {"qs": (4, 64), "qh": (2, 32)},
    "IQ4_NL": {"qs": (4, 16)},
    "IQ4_XS": {"scales_l": (4, 1), "scales_h": (2, 1), "qs": (4, 16)},
    "TQ2_0": {"qs": (2, 32)},
    "Q1_0": {"qs": (1, 1)},
    "MXFP4": {"qs": (4, 16)},
    "NVFP4": {"qs": (4, 8)},
}


def field_of(kind: str, name: str) -> slice:
    """The bytes of a block's field."""
    return slice(*FIELDS[kind][name])


def changed(blocks: Array, where: slice, to: Array | int) -> Array:
    """Blocks with other bytes in one field."""
    out = blocks.copy()
    out[:, where] = to
    return out


def half_at(blocks: Array, where: slice) -> Array:
    """A float16 field of each block: [n, 1]."""
    return np.ascontiguousarray(blocks[:, where]).view(np.float16).astype(np.float32)


def blocks_of(kind: str, stored: Array) -> Array:
    """A tensor's bytes as blocks: [block, bytes]."""
    return np.ascontiguousarray(stored).view(np.uint8).reshape(-1, block_sizes(kind)[1])


def values_of(kind: str, blocks: Array) -> Array:
    """What gguf-py makes of any bytes of blocks, be they scales or not: [..., bytes] -> [..., value]."""
    with np.errstate(all="ignore"):
        return decode(kind, np.ascontiguousarray(blocks).view(np.float16 if kind == "F16" else np.uint8))


def halves_of(kind: str, blocks: Array) -> dict[str, Array]:
    """The float16 fields of blocks, as their bits: name -> [block]."""
    return {
        name: np.ascontiguousarray(blocks[:, slice(*place)]).view(np.uint16)[:, 0]
        for name, place in FIELDS.get(kind, {}).items()
        if name in HALVES
    }
