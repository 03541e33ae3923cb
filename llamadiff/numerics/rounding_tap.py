"""Applies policies inside the engine: how each lane rounds operands, cached rows and angles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from llamaref import Tap
from llamaref.config import Rope
from llamaref.sums import Matrices
from numpy.typing import NDArray

from llamadiff.numerics.angles import bf16_angles, ggml_angles
from llamadiff.numerics.policies import COARSE_ATTENTION, NATIVE, kept_rows, operands, sums_of
from llamadiff.numerics.rounding import Rounding
from llamadiff.numerics.summing import Kernel, half_sums

Array = NDArray[Any]


class Carrier(Tap):
    """The part of a llamaref.Tap that rounds: one arithmetic for each index of the batch axis.

    ``ways`` are a policy and the types of the cache (``cache_k``, ``cache_v``) for each; ``reading`` is what the
    policies READ and READ_PERTURBED do. ``edges``: where batches of rows begin and end, if there are several. Arrays
    whose batch is 1 are widened where the ways differ. ``lost``: by way, the NMSE that may be left in the last product
    of sums in float16.
    """

    def __init__(
        self,
        ways: Sequence[tuple[str, Mapping[str, str]]],
        reading: Mapping[str, Rounding] | None = None,
        edges: Sequence[int] = (),
    ) -> None:
        self.ways, self.reading, self.edges = tuple(ways), reading or {}, tuple(edges)
        self.lost: dict[int, float] = {}

    def take_lost(self) -> dict[int, float]:
        """``lost``, which is empty then."""
        lost = self.lost
        self.lost = {}
        return lost

    @property
    def first(self) -> Carrier:
        """The same with the first way alone."""
        return Carrier(self.ways[:1], self.reading, self.edges)

    def operands(self, kind: str, *arrays: Array) -> tuple[Array, ...]:
        rounded = partial(operands, reading=self.reading, edges=self.edges)
        floating = all(array.dtype.kind != "i" and len(array) == 1 for array in arrays)
        if len(self.ways) == 1 and floating:  # nothing is to be put beside something else
            policy, stored = self.ways[0]
            alone = rounded(policy, kind, stored, *(array[0] for array in arrays))
            return tuple(part[None] for part in alone)
        out = [array if array.dtype.kind == "i" else self.widen(array) for array in arrays]
        floats, sums = [array for array in out if array.dtype.kind != "i"], None
        for number, (policy, stored) in enumerate(self.ways):
            parts = [array[number] for array in floats]
            given = rounded(policy, kind, stored, *parts)
            for before, after in zip(parts, given, strict=False):
                if after is not before:
                    before[...] = after
            for more in given[len(parts) :]:
                sums = np.zeros((len(self.ways), *more.shape), more.dtype) if sums is None else sums
                sums[number] = more
        return (*out, sums) if sums is not None else tuple(out)

    def accumulate(self, y: Array, kind: str, parts: Matrices, start: int = 0, by_row: bool = False) -> Array:
        added = {number: sums for number, (policy, stored) in enumerate(self.ways)
                 if (sums := sums_of(policy, kind, stored))}  # fmt: skip
        if not added:
            return y
        y = self.widen(y)
        for number, sums in added.items():
            lost = self.kernel(sums, kind, start, by_row).accumulate(y[number], parts(number))
            self.lost[number] = max(lost, self.lost.get(number, 0.0))
        return y

    def kernel(self, sums: str, kind: str, start: int, by_row: bool) -> Kernel:
        """What adds products of a kind of operands in float16, rows from the ``start``-th on."""
        in_half = half_sums()
        assert in_half is not None
        return in_half.kernel(sums, kind, self.edges, start, by_row)

    def store(self, kind: str, x: Array) -> Array:
        x = self.widen(x)
        for number, (policy, stored) in enumerate(self.ways):
            x[number] = kept_rows(policy, kind, stored, x[number], self.reading)
        return x

    def is_wanted(self, name: str) -> bool:
        return True

    def angles(
        self, cos: Array, sin: Array, rope: Rope, positions: Array, factors: Array | None
    ) -> tuple[Array, Array]:
        made = {NATIVE: ggml_angles(rope, positions, factors)}
        if any(policy == COARSE_ATTENTION for policy, _ in self.ways):
            made[COARSE_ATTENTION] = bf16_angles(rope, positions, factors)
        chosen = [made.get(policy, (cos, sin)) for policy, _ in self.ways]
        return np.stack([c for c, _ in chosen]), np.stack([s for _, s in chosen])

    def widen(self, x: Array) -> Array:
        """A copy of ``x`` [1 or way, ...] with one batch entry a way."""
        return np.array(x) if len(x) == len(self.ways) else np.repeat(x, len(self.ways), axis=0)
