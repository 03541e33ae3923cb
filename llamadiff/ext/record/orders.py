"""Orders in which engines keep the heads of Q and K: RoPE's pairs side by side, or in two halves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.engines.model_file import Runnable
from llamadiff.trace.taps import Tap

Array = NDArray[Any]
Order = NDArray[np.int64]  # [value]: the index that each value has in llama.cpp's row
ROTATED = ("Qcur_proj", "Kcur_proj", "Qcur_normed", "Kcur_normed", "Qcur_rope", "Kcur_rope")


def orders_of(tap: Tap, model: Runnable, width: int) -> Iterator[Order | None]:
    """Those in which an engine may have a tap's rows; none but llama.cpp's own (None) where nothing is rotated."""
    yield None
    dim = model.sizes.get("dim", 0)
    rope = next((each for each in getattr(model, "ropes", ()) if each is not None), None)
    if tap.kind.word not in ROTATED or rope is None or not dim or width % dim:
        return
    half = rope.n_rot // 2
    pairs = np.arange(2 * half).reshape(half, 2).T.reshape(-1)  # 0 2 4 ... 1 3 5 ...
    halves = np.arange(2 * half).reshape(2, half).T.reshape(-1)  # 0 h 1 h+1 ...
    for head in (pairs, halves):
        whole = np.concatenate([head, np.arange(2 * half, dim)])
        yield (np.arange(0, width, dim)[:, None] + whole).reshape(-1)


def back(values: Array, order: Order) -> Array:
    """Values that an engine has in an order, as llama.cpp has them."""
    out = np.empty_like(values)
    out[order] = values
    return out
