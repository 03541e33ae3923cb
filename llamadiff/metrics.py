"""Arrays in, floats out. Everything in float64; non-finite values are counted, and left out of the sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Stats:
    """One side of a tap: moments over its finite values, and how many are not finite."""

    rms: float
    mean: float
    min: float
    max: float
    nan: int
    inf: int


@dataclass(frozen=True)
class Worst:
    """The element that differs most: its token (row), its index within the tap, and both values."""

    token: int | None
    index: tuple[int, ...]
    baseline: float
    candidate: float


@dataclass(frozen=True)
class Difference:
    """Candidate against baseline over one tap.

    ``nmse`` is sum((c-b)^2) / sum(b^2); ``per_token`` the same for each row. Where one side alone is not
    finite, ``nmse`` is infinite and ``worst`` is the first such place.
    """

    nmse: float
    cosine: float
    max_abs: float
    mean_drift: float
    worst: Worst
    per_token: tuple[float, ...]


def stats(x: Array) -> Stats:
    """Moments of a tap's values."""
    wide = np.asarray(x, np.float64)
    finite = wide[np.isfinite(wide)]
    nan, inf = int(np.isnan(wide).sum()), int(np.isinf(wide).sum())
    if not finite.size:
        return Stats(0.0, 0.0, 0.0, 0.0, nan, inf)
    rms = float(np.sqrt(np.mean(finite * finite)))
    return Stats(rms, float(finite.mean()), float(finite.min()), float(finite.max()), nan, inf)


def row_errors(candidate: Array, baseline: Array, axis: int) -> tuple[Array, Array]:
    """Per row of ``axis``: sum((c-b)^2) and sum(b^2).

    Equal non-finite values on both sides count as no difference; on one side only, as an infinite one.
    """
    c, b = (
        np.moveaxis(np.asarray(candidate, np.float64), axis, 0),
        np.moveaxis(np.asarray(baseline, np.float64), axis, 0),
    )
    c, b = c.reshape(c.shape[0], -1), b.reshape(b.shape[0], -1)
    with np.errstate(invalid="ignore"):
        error = c - b
    bad = ~np.isfinite(error)
    if bad.any():
        error = np.where(bad, np.where(_same_nonfinite(c, b), 0.0, np.inf), error)
        b = np.where(np.isfinite(b), b, 0.0)
    with np.errstate(over="ignore"):
        return np.einsum("ij,ij->i", error, error), np.einsum("ij,ij->i", b, b)


def _same_nonfinite(c: Array, b: Array) -> Array:
    return np.asarray((np.isnan(c) & np.isnan(b)) | (c == b))


def ratio(error: float, reference: float) -> float:
    """error / reference for sums of squares: 0 if there is no error, infinite for an error against nothing."""
    if error == 0:
        return 0.0
    return error / reference if reference > 0 else float("inf")


def nmse(candidate: Array, baseline: Array, axis: int) -> float:
    """sum((c-b)^2) / sum(b^2) over all rows."""
    error, reference = row_errors(candidate, baseline, axis)
    return ratio(float(error.sum()), float(reference.sum()))


def difference(candidate: Array, baseline: Array, axis: int) -> Difference:
    """Compare two arrays of one shape; ``axis`` runs over tokens."""
    error, reference = row_errors(candidate, baseline, axis)
    c, b = np.asarray(candidate, np.float64), np.asarray(baseline, np.float64)
    both = np.isfinite(c) & np.isfinite(b)
    gap = np.where(
        both, np.abs(np.where(both, c, 0.0) - np.where(both, b, 0.0)), np.where(_same_nonfinite(c, b), 0.0, np.inf)
    )
    place = np.unravel_index(int(gap.argmax()), gap.shape) if gap.size else ()
    index = tuple(int(i) for i in place)
    worst = Worst(index[axis] if index else None, index, float(b[place]), float(c[place]))
    cf, bf = np.where(both, c, 0.0).ravel(), np.where(both, b, 0.0).ravel()
    norms = float(np.linalg.norm(cf) * np.linalg.norm(bf))
    cosine = float(cf @ bf) / norms if norms > 0 else (1.0 if not error.any() else 0.0)
    mean_drift = float(cf.mean() - bf.mean()) if cf.size else 0.0
    per_token = tuple(ratio(float(e), float(r)) for e, r in zip(error, reference, strict=True))
    nmse = ratio(float(error.sum()), float(reference.sum()))
    return Difference(nmse, cosine, float(gap.max(initial=0.0)), mean_drift, worst, per_token)


def log_softmax(logits: Array) -> Array:
    """Log-probabilities over the last axis, in float64."""
    wide = np.asarray(logits, np.float64)
    wide = wide - wide.max(axis=-1, keepdims=True)
    return np.asarray(wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True)))


def kl_divergence(baseline: Array, candidate: Array) -> float:
    """KL(baseline || candidate) in nats between the distributions of two logit vectors."""
    p, q = log_softmax(baseline), log_softmax(candidate)
    return float(max(0.0, (np.exp(p) * (p - q)).sum()))
