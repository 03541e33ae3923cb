"""Tensors as a few numbers a row: their moments, and projections on random signs, from which distances are estimated.

For signs r that are +1 or -1 with equal chance, (r . d)^2 has the mean |d|^2, whatever d is: so the mean over ``k``
projections of two rows' difference estimates how far the rows are apart, though neither row is there any more.
docs/sketches.md derives how sure that is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.numerics import metrics
from llamadiff.trace import taps
from llamadiff.trace.sketch import MOMENTS, RowSketch, Sketch

Array = NDArray[Any]

SEED, PROJECTIONS = 1, 4
SELDOM = 6.9  # -ln of how seldom a bound fails: one time in a thousand


def sketch_of(trace: Mapping[str, Array], seed: int = SEED, projections: int = PROJECTIONS) -> Sketch:
    """The sketch of all taps of a trace that hold numbers to measure: choices of experts do not."""
    known = {name: tap for name in trace if (tap := taps.parse(name)) is not None and tap.kind.op != "ARGSORT"}
    shapes = {name: tuple(trace[name].shape) for name in known}
    rows = {
        name: sketch_rows(metrics.Rows(trace[name], tap.row_axis), seed, projections) for name, tap in known.items()
    }
    return Sketch(seed, projections, shapes, rows)


def sketch_rows(rows: metrics.Rows, seed: int, k: int) -> RowSketch:
    """The sketch of a tensor's rows."""
    moments, projected = np.empty((rows.shape[0], len(MOMENTS))), np.empty((rows.shape[0], k))
    width = rows.size // max(1, rows.shape[0])
    with np.errstate(all="ignore"):
        for some in rows.blocks:
            values = rows.block(some)
            moments[some] = np.stack(
                [np.sqrt(np.square(values).mean(axis=1)), values.mean(axis=1), values.min(axis=1), values.max(axis=1)],
                axis=1,
            )
            for place, row in enumerate(values, some.start):
                projected[place] = signs(seed, place, width, k) @ row
    return RowSketch(moments.astype(np.float32), projected.astype(np.float32), width)


def signs(seed: int, row: int, width: int, k: int) -> Array:
    """+1 and -1 [k, width] of one row: bit j of SplitMix64's hash of (seed, row, column) is the j-th projection's."""
    columns = np.arange(width, dtype=np.uint64)
    hashes = splitmix64(columns + np.uint64(((row << 32) ^ (seed << 52)) & 0xFFFFFFFFFFFFFFFF))
    bits = (hashes[None, :] >> np.arange(k, dtype=np.uint64)[:, None]) & np.uint64(1)
    return np.asarray(1.0 - 2.0 * bits.astype(np.float64))


def splitmix64(x: Array) -> Array:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014), of x plus its odd constant."""
    with np.errstate(over="ignore"):
        z = x + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(z ^ (z >> np.uint64(31)))


def drift_from(sketch: Sketch, tap: str, own: metrics.Rows) -> metrics.Difference:
    """How far a tap's values are from those that were sketched: they are sketched with the same signs."""
    return estimate_difference(sketch_rows(own, sketch.seed, sketch.projections), sketch.rows[tap])


def stats_of(rows: RowSketch) -> metrics.Stats:
    """The moments of the whole tensor."""
    if not np.isfinite(rows.moments).all():
        bad = np.isnan(rows.moments[:, 0]).sum()
        return metrics.Stats(0.0, 0.0, 0.0, 0.0, int(bad), int(np.isinf(rows.moments[:, 0]).sum()))
    rms, mean, low, high = rows.moments.astype(np.float64).T
    return metrics.Stats(
        float(np.sqrt(np.mean(np.square(rms)))), float(mean.mean()), float(low.min()), float(high.max()), 0, 0
    )


def estimate_difference(candidate: RowSketch, baseline: RowSketch) -> metrics.Difference:
    """The difference of two tensors, from sketches with the same signs; what a sketch does not tell is NaN."""
    b, c = (side.projected.astype(np.float64) for side in (baseline, candidate))
    gaps = c - b
    errors = np.where(np.isfinite(gaps), np.square(gaps), np.inf).mean(axis=1)
    sizes = np.square(baseline.moments[:, 0], dtype=np.float64) * baseline.width
    total, size, norms = float(errors.sum()), float(sizes.sum()), float(np.sqrt(np.vdot(b, b) * np.vdot(c, c)))
    cosine = float(np.vdot(b, c)) / norms if norms > 0 else 1.0  # of one estimate: 1 where it sees no difference alone
    means = candidate.moments[:, 1].astype(np.float64) - baseline.moments[:, 1]
    token = int(errors.argmax()) if len(errors) else None
    nan = float("nan")
    per_token = metrics.ratios(errors, sizes)
    worst = metrics.Worst(token, (), nan, nan)
    return metrics.Difference(
        metrics.ratio(total, size), cosine, nan, float(means.mean()) if len(means) else 0.0, worst, per_token
    )


def at_most(k: int) -> float:
    """How many times too large an estimate of ``k`` projections is, but for one time in a thousand.

    Laurent and Massart's bound (2000) for chi-square with k degrees of freedom, whose moments random signs do not
    exceed (Achlioptas 2003).
    """
    return float(1 + 2 * np.sqrt(SELDOM / k) + 2 * SELDOM / k)
