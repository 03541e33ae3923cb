"""How far two sides' next-token distributions are apart, over many positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.numerics import metrics
from llamadiff.result.logits import Positions

Array = NDArray[Any]


def over_positions(baseline: Array, candidate: Array) -> Positions | None:
    """Logits [token, vocab] of both sides; None where they hold no distribution at any position."""
    apart = [(i, kl, regret) for i, (kl, regret) in enumerate(map(_distance, baseline, candidate)) if np.isfinite(kl)]
    if not apart:
        return None
    places, divergences, regrets = (np.array(column) for column in zip(*apart, strict=True))
    worst = int(divergences.argmax())
    return Positions(
        count=len(apart), kl_mean=float(divergences.mean()), kl_p99=percentile_99(divergences),
        kl_worst=float(divergences[worst]), worst_at=int(places[worst]),
        regret_mean=float(regrets.mean()), regret_worst=float(regrets.max()), agreeing=int((regrets == 0).sum()),
    )  # fmt: skip


def percentile_99(values: Sequence[float] | Array) -> float:
    """The smallest value that 99 in 100 do not exceed: of fewer than 100, the largest."""
    return float(np.sort(np.asarray(values))[int(np.ceil(0.99 * len(values))) - 1])


def divergences(baseline: Array, candidate: Array) -> Array:
    """KL(baseline || candidate) at each position; NaN where there is no distribution."""
    return np.array([metrics.kl_divergence(b, c) for b, c in zip(baseline, candidate, strict=True)])


def _distance(b: Array, c: Array) -> tuple[float, float]:
    """One position's KL and regret; NaN where a side has no first token."""
    kl = metrics.kl_divergence(b, c)
    if not np.isfinite(kl):
        return float("nan"), 0.0
    return kl, float(b.max()) - float(b[int(np.argmax(c))])
