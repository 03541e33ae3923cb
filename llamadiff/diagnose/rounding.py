"""What any op may suffer from the numbers it is computed in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff import arithmetic, taps
from llamadiff.diagnose.case import Case
from llamadiff.diagnose.known import Change, Recipe, bug

Array = NDArray[Any]
EVERY = tuple(kind.word for kind in taps.KINDS if kind.op != "ARGSORT")
LARGEST = 65504.0  # of float16


@dataclass(frozen=True)
class Through:
    """Another recipe's result, kept in a type for a moment."""

    recipe: Recipe
    kind: str

    def compute(self, case: Case) -> Array:
        return arithmetic.ROUNDINGS[self.kind](self.recipe.compute(case))


@bug(*EVERY, fix="keep this tensor in float32 or bfloat16: float16 ends at 65504", source="sglang#27540")
def overflow_in_half(r: Recipe, case: Case) -> Iterator[Change]:
    """Values overflow float16: they are Inf from 65504 on."""
    if case.recorded is None or np.nanmax(np.abs(case.recorded), initial=0.0) < LARGEST:
        return
    yield Change(Through(r, "F16"), f"overflows float16: values beyond {LARGEST:.0f} are Inf", "inf")
    yield Change(Clipped(r), f"is clipped to float16's largest value, {LARGEST:.0f}", "clipped")


@dataclass(frozen=True)
class Clipped:
    """Another recipe's result, clipped to float16's range."""

    recipe: Recipe

    def compute(self, case: Case) -> Array:
        return np.clip(self.recipe.compute(case), -LARGEST, LARGEST)


@bug(*EVERY, harmless=True, fix="nothing: 16 bits round this much")
def result_rounded(r: Recipe, case: Case) -> Iterator[Change]:
    """The op's result was rounded to 16 bits on its way."""
    for kind in ("F16", "BF16"):
        yield Change(Through(r, kind), f"rounds its result to {kind}", kind)
