"""Where the fields of a block lie, for every type of blocks (ggml-common.h)."""

from __future__ import annotations

from typing import Any

import numpy as np
from llamaref.weights import block_sizes
from numpy.typing import NDArray

from llamadiff.diagnose.bugs.quant_blocks import FIELDS

Array = NDArray[Any]
Fields = dict[str, tuple[int, int]]

# Those that diagnose/bugs/quant_blocks.py has, and the others: d is the scale, m the minimum, e a power of two.
LAYOUTS: dict[str, Fields] = {
    **FIELDS,
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


def blocks_of(kind: str, stored: Array) -> Array:
    """A tensor's bytes as blocks: [block, bytes]."""
    return np.ascontiguousarray(stored).view(np.uint8).reshape(-1, block_sizes(kind)[1])


def halves_of(kind: str, blocks: Array) -> dict[str, Array]:
    """The float16 fields of blocks, as their bits: name -> [block]."""
    fields = {name: place for name, place in LAYOUTS.get(kind, {}).items() if name in HALVES}
    return {
        name: np.ascontiguousarray(blocks[:, first:last]).view(np.uint16)[:, 0]
        for name, (first, last) in fields.items()
    }
