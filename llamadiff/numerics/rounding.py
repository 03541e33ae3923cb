"""A rounding that no list has, described by how far it moves values, so that noise of its size can be drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

OWN, ROW, TENSOR = 0, -1, -2  # what shares a step, where it is no block: each value by itself, a row, all of a tensor
BLOCKS = (OWN, 16, 32, 64, 128, 256, ROW, TENSOR)
LEVELS = 127  # steps from zero to the largest value, of 8 bits
UNIFORM = 1 / math.sqrt(12)  # rms of what is rounded to the nearest, in steps


@dataclass(frozen=True)
class Rounding:
    """Operands rounded to ``base`` (a ggml type), and moved by ``size`` more steps (rms).

    A step is 1/127 of the largest of ``block`` values; of OWN, the value itself. ``sure``: no other base or block does
    as well; else only how coarse it is can be told.
    """

    base: str
    block: int = OWN
    size: float = 0.0
    sure: bool = True

    def perturb(self, x: Array) -> Array:
        """Values moved at random by as much."""
        if not self.size or x.dtype.kind != "f":
            return x
        return np.asarray(x + steps(x, self.block) * noise(x, self.size * math.sqrt(3)), x.dtype)

    @classmethod
    def to_bits(cls, bits: int, block: int) -> Rounding:
        """That of whole numbers of so many bits, to the nearest."""
        return cls("F32", block, UNIFORM * LEVELS / (2 ** (bits - 1) - 1))

    @property
    def bits(self) -> int:
        """How many bits round as much, to the nearest; no more than those of the type."""
        of_type = 24 if self.base == "F32" else 8
        if not self.size:
            return of_type
        if self.block == OWN:
            return min(of_type, max(1, round(-math.log2(2 * self.size / UNIFORM)) + 1))
        return min(of_type, max(2, round(math.log2(LEVELS * UNIFORM / self.size + 1) + 1)))

    def words(self) -> str:
        """To what it rounds, in words that follow "rounds ... to"."""
        if not self.sure:
            return f"about {self.bits} bits"
        if not self.size:
            return self.base
        if self.base != "F32":
            return f"{self.base} in a way of its own, {self.size:.2g} steps off"
        shared = {OWN: "each value by itself", ROW: "one scale a row", TENSOR: "one scale for the tensor"}
        return f"about {self.bits} bits, {shared.get(self.block, f'in blocks of {self.block}')}"


def noise(x: Array, reach: float, draw: int = 0) -> Array:
    """Noise for each value of x [..., n], even within ``reach``: rows that are alike are rounded alike."""
    drawn = np.random.default_rng(draw).uniform(-reach, reach, x.shape)
    if x.ndim < 2 or not x.size:
        return drawn
    rows = np.ascontiguousarray(x).reshape(-1, x.shape[-1])
    _, first, same = np.unique(rows.view(np.dtype((np.void, rows.strides[0]))), return_index=True, return_inverse=True)
    return drawn.reshape(rows.shape)[first[same.reshape(-1)]].reshape(x.shape)


def steps(x: Array, block: int) -> Array:
    """The step of each value [..., n]: 1/127 of its block's largest; of OWN, its own size."""
    size = np.abs(x)
    if block == OWN:
        return size
    if block == TENSOR:
        return np.broadcast_to(size.max(initial=0.0) / LEVELS, x.shape)
    n = x.shape[-1]
    width = block if block > 0 and n % block == 0 else n
    peaks = size.reshape(*x.shape[:-1], -1, width).max(axis=-1, keepdims=True) / LEVELS
    return np.broadcast_to(peaks, (*peaks.shape[:-1], width)).reshape(x.shape)
