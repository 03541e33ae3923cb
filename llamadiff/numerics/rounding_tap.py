"""Applies policies inside the engine: how each lane rounds operands, cached rows and angles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from llamaref.config import Rope
from numpy.typing import NDArray

from llamadiff.numerics import arithmetic
from llamadiff.numerics.policies import NATIVE, READ, READ_SHAKEN, ROUGH, ROUGH_ATTENTION, ROUGH_CACHE, rounding_type
from llamadiff.numerics.rounding import ROW, Rounding

Array = NDArray[Any]

MOVED = 2.0**-7  # of a score: twice what bfloat16 does that cuts off, for that of the softmax's own sums
CACHES = ("cache_k", "cache_v")
# what is cut off to 8 bits, and not rounded, errs as what is rounded to 7
_ROUGH = {ROUGH: Rounding.to_bits(7, ROW), ROUGH_CACHE: Rounding.to_bits(4, 32)}


class Carrier:
    """The part of a llamaref.Tap that rounds: one arithmetic for each index of the batch axis.

    ``ways`` are a policy and the types of the cache (``cache_k``, ``cache_v``) for each; ``reading`` is what the
    policies READ and READ_SHAKEN do. Arrays whose batch is 1 are widened where the ways differ.
    """

    def __init__(
        self, ways: Sequence[tuple[str, Mapping[str, str]]], reading: Mapping[str, Rounding] | None = None
    ) -> None:
        self.ways, self.reading = tuple(ways), reading or {}

    def __call__(self, name: str, x: Array) -> Array:
        return x

    def operands(self, kind: str, *arrays: Array) -> tuple[Array, ...]:
        out = [array if array.dtype.kind == "i" else self._widened(array) for array in arrays]
        sums = None
        for number, (policy, stored) in enumerate(self.ways):
            read = self._read(kind, arrays[0].shape[-1]) if policy in (READ, READ_SHAKEN) else None
            to = read.base if read is not None else rounding_type(policy, kind, stored)
            if arithmetic.is_q8_1(to):
                sums = np.zeros((*out[0].shape[:-1], out[0].shape[-1] // 32), out[0].dtype) if sums is None else sums
                sums[number] = arithmetic.sums_as(to, out[0][number])
            stands = policy == NATIVE and stored.get(kind, to) != to  # a cache's rows are as they were stored
            for array in out[:1] if stands else out:
                if array.dtype.kind != "i" and to in arithmetic.ROUNDINGS:
                    array[number] = arithmetic.ROUNDINGS[to](array[number])
                if policy == READ_SHAKEN and read is not None:
                    array[number] = read.shaken(array[number])
            if policy == (ROUGH_CACHE if kind in CACHES else ROUGH):
                rough = out[1] if kind in CACHES else out[0]
                rough[number] = _ROUGH[policy].shaken(rough[number])
            if policy == ROUGH_ATTENTION and kind == "cache_k":
                out[1][number] = _scores_moved(out[1][number])
            elif policy == ROUGH_ATTENTION and kind == "cache_v":
                out[0][number], out[1][number] = (arithmetic.round_bf16(array[number]) for array in out)
        return (*out, sums) if sums is not None else tuple(out)

    def _read(self, kind: str, width: int) -> Rounding | None:
        """What was read back of such operands, if anything was."""
        return self.reading.get(f"{kind}:{width}", self.reading.get(kind))

    def stored(self, kind: str, x: Array) -> Array:
        x = self._widened(x)
        for number, (policy, stored) in enumerate(self.ways):
            to = arithmetic.as_cpu(stored.get(kind, "F32"), stored.get("q8", arithmetic.AVX))
            kept = kind.replace("cache", "kept")
            if to in arithmetic.ROUNDINGS:
                x[number] = arithmetic.ROUNDINGS[to](x[number])
            if policy == READ_SHAKEN and kept in self.reading:
                x[number] = self.reading[kept].shaken(x[number])
        return x

    def wanted(self, name: str) -> bool:
        return True

    def angles(
        self, cos: Array, sin: Array, rope: Rope, positions: Array, factors: Array | None
    ) -> tuple[Array, Array]:
        made = {NATIVE: arithmetic.ggml_angles(rope, positions, factors)}
        if any(policy == ROUGH_ATTENTION for policy, _ in self.ways):
            made[ROUGH_ATTENTION] = arithmetic.bf16_angles(rope, positions, factors)
        chosen = [made.get(policy, (cos, sin)) for policy, _ in self.ways]
        return np.stack([c for c, _ in chosen]), np.stack([s for _, s in chosen])

    def _widened(self, x: Array) -> Array:
        """A copy with one batch entry a way."""
        return np.array(x) if len(x) == len(self.ways) else np.repeat(x, len(self.ways), axis=0)


def _scores_moved(keys: Array) -> Array:
    """Keys [..., d], each times a factor of its own: their scores move as where they are kept in bfloat16."""
    factors = np.random.default_rng(0).uniform(-MOVED, MOVED, (*keys.shape[:-1], 1))
    return np.asarray(keys * (1 + factors), keys.dtype)
