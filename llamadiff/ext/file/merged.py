"""What an applied LoRA adapter adds to a tensor of a file: the file is held against a checkpoint that has it merged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llamaref.adapters import EMBEDDING, Adapter
from numpy.typing import NDArray

Array = NDArray[Any]


def added_to(adapter: Adapter | None, name: str) -> Callable[[Array], Array] | None:
    """The rows of s B A by their numbers, through all experts; None of a tensor that the adapter has no pair for."""
    pair = None if adapter is None else adapter.pairs.get(name)
    if adapter is None or pair is None:
        return None
    a, b = adapter.weights.whole(pair.a), adapter.weights.whole(pair.b)
    left, right = (a, b.T) if name == EMBEDDING else (b, a)
    left, right = (x.reshape(-1, *x.shape[-2:]).astype(np.float64) for x in (left, right))  # [expert, ., .]
    s, height = adapter.factor(name), left.shape[1]

    def rows_of(numbers: Array) -> Array:
        found = np.empty((len(numbers), right.shape[2]))
        for expert in np.unique(numbers // height):
            own = numbers // height == expert
            found[own] = s * (left[expert][numbers[own] % height] @ right[expert])
        return found

    return rows_of
