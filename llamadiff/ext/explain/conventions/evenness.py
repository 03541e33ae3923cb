"""Whether movements are such as rounding makes: bounded by a step, even, no factor of a token, no vector of all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.numerics.rounding import OWN

Array = NDArray[Any]
Looks = dict[int, tuple[float, float]]  # what shares a step -> the kurtosis of movements in steps, and their rms

EVEN = 8.0  # the largest movement over their rms: sqrt(3) of a rounding, up to this where roundings add up
FLOATING = 2.0**-6  # of a value: sums and values of 16 bits are moved by less
SUMMED = EVEN * 2.0**-7  # the same where an error is a sum of many
STEADY = 0.8  # of the movement, that one factor or one vector may explain: more is no rounding
FEW = 16  # values that look like a factor, or like a vector, by chance
ALIKE = 6.0  # how many times the movement of the median token one may have
CRUDE = 2.0**-7  # of a value (an angle, an exponent), that a table or a polynomial of 16 bits is off by at most
USUAL_OF_8 = 0.75  # the rms of 8 bits, in steps: 0.58 where values are cut off
UNEVEN = 100.0  # where what is rounded has hardly anything to lose: probabilities near one


def even(
    most: float,
    movements: Iterable[tuple[int, Array, Array]],
    own: float = FLOATING,
    even: float = EVEN,
    usual: float = np.inf,
) -> Looks:
    """Of movements [token, ...] in several steps (block, movement, its steps), those that rounding may make.

    They are even over all values, in every token as in the others, and no larger than it. ``most``: how many steps
    rounding may move a value by; ``own``: the part of a value, where that is its own step; ``even``: how many times the
    rms one value may be moved by; ``usual``: the largest rms, in steps.
    """
    found: Looks = {}
    for block, moved, step in movements:
        in_steps = np.divide(moved, step, out=np.zeros_like(moved), where=step > 0).reshape(len(moved), -1)
        counts = (step > 0).reshape(len(moved), -1).sum(axis=1)
        tokens = np.sqrt((in_steps**2).sum(axis=1) / np.maximum(counts, 1))[counts > 0]
        size, peak = float(np.sqrt((in_steps**2).sum() / max(1, counts.sum()))), float(in_steps.max())
        alike = even >= UNEVEN or not len(tokens) or tokens.max() <= ALIKE * np.median(tokens)
        if 0 < peak <= min(own if block == OWN else most, even * size) and size <= usual and alike:
            fourth = float((in_steps**4).sum() / max(1, counts.sum()))
            found[block] = fourth / size**4, size
    return found


def is_steady(d: Array, x: Array) -> bool:
    """Whether one factor a token, or one vector for all tokens, makes most of a movement [token, n]."""
    if x.shape[-1] < FEW:
        d, x = d.reshape(1, -1), x.reshape(1, -1)
    total = float((d * d).sum())
    size = np.maximum((x * x).sum(axis=-1), 1e-300)
    factors = (d * x).sum(axis=-1) ** 2 / size
    plain = x.reshape(-1, x.shape[-1])
    rows = np.unique(np.round(plain / max(plain.std(), 1e-300), 2), axis=0, return_index=True)[1]
    some = d.reshape(-1, d.shape[-1])[rows]
    vector = len(some) * float((some.mean(axis=0) ** 2).sum()) / max(float((some * some).sum()), 1e-300)
    factor = x.shape[-1] >= FEW and factors.sum() > STEADY * total
    return bool(factor or (len(some) >= 4 and vector > STEADY))
