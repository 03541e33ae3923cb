"""How a CPU's ggml rounds to eight bits: told by what its own function makes of some values, since CPUs differ."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.llamacpp.probes import TYPES, near_halves, rounded_probes
from llamadiff.numerics import cpu
from llamadiff.numerics.arithmetic import round_q8_k
from llamadiff.numerics.cpu import AVX, FUSED, NEON, PLAIN, UNKNOWN
from llamadiff.numerics.eight_bits import round_q8_0

Array = NDArray[Any]


@cache
def q8_way() -> str:
    """That of this machine's llama-cpp-python."""
    return way_of(rounded_probes())


def way_of(rounded: Mapping[str, str], order: str = "<") -> str:
    """One of cpu.Q8_WAYS, by ``rounded_probes``; UNKNOWN where they are none, or fit none. ``order``: of bytes."""
    q8_0, q8_k = (_values(name, rounded.get(name, ""), order) for name in TYPES)
    ways = (way for way in (AVX, NEON, PLAIN) if _same(round_q8_0(probe("Q8_0"), way), q8_0))
    fused = (words for words in ("", FUSED) if _same(round_q8_k(probe("Q8_K"), fused=bool(words)), q8_k))
    way, words = next(ways, None), next(fused, None)
    return UNKNOWN if way is None or words is None else cpu.q8_way(way, words)


def probe(name: str) -> Array:
    """The values that are asked about, [block, value]."""
    return np.array(near_halves(TYPES[name][1]), np.float32).reshape(-1, TYPES[name][1])


def _same(expected: Array, found: Array | None) -> bool:
    return found is not None and np.array_equal(expected, found)


def _values(name: str, blocks: str, order: str) -> Array | None:
    """What blocks hold."""
    _, values, size = TYPES[name]
    made = np.frombuffer(base64.b64decode(blocks), np.uint8)
    if not made.size or made.size % size:
        return None
    made = made.reshape(-1, size)
    scale = np.dtype(order + ("f2" if name == "Q8_0" else "f4"))
    scales = np.ascontiguousarray(made[:, : scale.itemsize]).view(scale).astype(np.float32)
    quants = np.ascontiguousarray(made[:, scale.itemsize : scale.itemsize + values]).view(np.int8)
    return np.asarray(quants * scales)
