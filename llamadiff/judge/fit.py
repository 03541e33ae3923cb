"""Which of the arithmetics that were tried a tap's rows fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

EXACT = 1e-13  # NMSE of a row: closer fits say no more
DISTINCT = 10.0  # how many times an exact fit's limit another arithmetic must miss a row by, to be told from it
ALIKE = 5.0  # noise of the same kind: within this factor either way


def nearest(errors: Sequence[Array], sizes: Array, kept: float = 0.0) -> int:
    """The arithmetic that fits the rows best, each row for itself: one wrong row does not outweigh many exact ones.

    ``errors``: of each arithmetic, sums of squares of each row; ``sizes``: the squares of the rows themselves. The
    measure is the mean of logarithms, as for errors that are each of a size of their own. ``kept``: the NMSE that the
    precision leaves in which rows were kept; a closer fit is an accident.
    """
    if not len(sizes):
        return 0
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = [np.where(error > 0, error / sizes, 0.0) for error in errors]
    scores = [float(np.mean(np.log(np.maximum(np.nan_to_num(r, nan=np.inf), max(EXACT, kept))))) for r in relative]
    return int(np.argmin(scores))


def is_certain(own: Array, others: Sequence[Array], sizes: Array, match: float) -> bool:
    """Whether some row fits one arithmetic exactly and another not at all: then the engine has that one."""
    if not others:
        return False
    apart = np.max(np.stack([np.nan_to_num(error, nan=np.inf) for error in others]), axis=0)
    return bool(((own <= match * sizes) & (apart > DISTINCT * match * sizes)).any())


def alike(error: float, spreads: Sequence[float]) -> int | None:
    """Which rounding leaves about this error, of those whose distance from float32 is given; None: none does."""
    if not error > 0:
        return None
    apart = [abs(np.log(spread / error)) if 0 < spread < np.inf else np.inf for spread in spreads]
    best = int(np.argmin(apart)) if apart else 0
    return best if apart and apart[best] <= np.log(ALIKE) else None
