"""How a CPU's ggml rounds to eight bits: told by what its own function makes of some values, since CPUs differ."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.llamacpp.probes import TYPES, near_halves
from llamadiff.numerics import cpu
from llamadiff.numerics.arithmetic import round_q8_k
from llamadiff.numerics.cpu import AVX, FUSED, NEON, PARTNER, PLAIN, UNKNOWN
from llamadiff.numerics.eight_bits import round_q8_0

Array = NDArray[Any]


@dataclass(frozen=True)
class EightBits:
    """How a ggml rounds to eight bits: its ``way`` (cpu.Q8_WAYS, or UNKNOWN); and type of weights -> what activations
    are rounded to for them, as far as it says so.
    """

    way: str
    partners: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any], order: str = "<") -> EightBits:
        """Those of ``rounding_of``; ``order``: of bytes."""
        return cls(way_of(answer.get("rounded", {}), order), answer.get("partners", {}))

    def are_known(self, kinds: Iterable[str]) -> bool:
        """Whether it is known how activations are rounded for weights of these types, of those with eight bits."""
        rounded = [kind for kind in kinds if PARTNER.get(kind, "").startswith("Q8")]
        return not rounded or (
            self.way != UNKNOWN and all(self.partners.get(kind) == PARTNER[kind] for kind in rounded)
        )


def way_of(rounded: Mapping[str, str], order: str = "<") -> str:
    """One of cpu.Q8_WAYS, by ``rounded`` of ``rounding_of``; UNKNOWN where none fits. ``order``: of bytes."""
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
