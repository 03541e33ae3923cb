"""Two next-token distributions at every position: how far apart they are, and what each gives the token that came."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.numerics.metrics import log_softmax

Array = NDArray[Any]
FACTS = 3  # of each position: the KL, the other side's negative log-likelihood, and whether its first token is the same
KL, NLL, SAME = range(FACTS)
_ROWS = 16  # that are widened at once


def divergences(base: Array, other: Array, targets: Sequence[int | None]) -> Array:
    """Logits [position, vocabulary] of both sides -> [position, fact] in float64.

    KL(base || other) is in nats; the likelihood is that of the position's target, NaN where it has none.
    """
    found = np.full((len(targets), FACTS), np.nan)
    for at in range(0, len(targets), _ROWS):
        rows = slice(at, min(at + _ROWS, len(targets)))
        found[rows] = _of_rows(base[rows].astype(np.float64), other[rows].astype(np.float64), targets[rows])
    return found


def _of_rows(base: Array, other: Array, targets: Sequence[int | None]) -> Array:
    found = np.full((len(base), FACTS), np.nan)
    p, q = log_softmax(base), log_softmax(other)
    with np.errstate(invalid="ignore"):
        found[:, KL] = np.maximum(np.einsum("pv,pv->p", np.exp(p), np.where(np.isneginf(p), 0.0, p - q)), 0.0)
    for row, target in enumerate(targets):
        if target is not None:
            found[row, NLL] = -q[row, target]
    found[:, SAME] = base.argmax(axis=1) == other.argmax(axis=1)
    return found
