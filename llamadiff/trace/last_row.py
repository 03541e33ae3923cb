"""Taps that engines compute of the last token alone: one row stands for the last of all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.trace.taps import Tap

Array = NDArray[Any]
ENDS = ("result_norm", "result_output")


def is_last_row(tap: Tap, size: int, shape: Sequence[int]) -> bool:
    """Whether so many values are one row of a tap of this shape, and can only be the last token's."""
    return tap.name in ENDS and shape[0] > 1 and size * shape[0] == math.prod(shape)


def in_last_row(row: Array, shape: Sequence[int]) -> tuple[Array, Array]:
    """Values in the last row of a tap, and which of all values they are."""
    values, known = np.zeros(shape, row.dtype), np.zeros(shape, bool)
    values[-1], known[-1] = row.reshape(shape[1:]), True
    return values, known
