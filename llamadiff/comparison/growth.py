"""Whether the growth of the residual over the layers is normal: the baseline's own says so, where that is right."""

from __future__ import annotations

from collections.abc import Sequence

from llamadiff.comparison.rows import Row, stem
from llamadiff.numerics import tolerances

OUTPUT = "l_out"
NEAR = 0.02  # sizes that differ by less are the same
_STEADY = 2.0  # growth that is worth no word


def growth_sentence(rows: Sequence[Row], baseline: str, candidate: str) -> str | None:
    """How the size of the layers' outputs changes on both sides; None where that was not recorded.

    ``baseline`` and ``candidate`` are their names.
    """
    outputs = [row for row in rows if stem(row.tap) == OUTPUT and row.baseline and row.candidate]
    sizes = [(row.baseline.rms, row.candidate.rms) for row in outputs if row.baseline and row.candidate]
    if len(sizes) < 2 or not all(b > 0 for b, _ in sizes):
        return None
    layers = [row.layer for row in outputs]
    own = (
        f"from layer {layers[0]} to layer {layers[-1]} the residual of {baseline} {_change(sizes[0][0], sizes[-1][0])}"
    )
    if not any(row.drift for row in outputs):
        return own  # the other side is no run of its own: it was given the first one's inputs
    apart = next((at for at, (b, c) in enumerate(sizes) if not abs(c - b) <= NEAR * b), None)
    if apart is None:
        return f"{own}, and that of {candidate} does the same: {_normal(rows)}"
    b, c = sizes[apart]
    return f"{own}; that of {candidate} is another from layer {layers[apart]} on: its rms is {c:.3g} there, not {b:.3g}"


def _change(first: float, last: float) -> str:
    ratio = last / first
    if 1 / _STEADY < ratio < _STEADY:
        return f"keeps its size (rms {first:.3g} to {last:.3g})"
    return f"grows {ratio:.3g} times" if ratio > 1 else f"shrinks to a {1 / ratio:.3g}th"


def _normal(rows: Sequence[Row]) -> str:
    """What may be said of a growth that both sides have; nothing, where nobody judged either."""
    if not any(row.local is not None or row.baseline_local is not None for row in rows):
        return "whether that is right was not judged"
    if any(row.baseline_local is not None and row.baseline_local.verdict == tolerances.WRONG for row in rows):
        return "but the baseline is wrong itself"
    wrong = any(row.verdict == tolerances.WRONG for row in rows)
    return "it is the model's own, and no sign of a fault" if not wrong else "what is wrong does not show in it"
