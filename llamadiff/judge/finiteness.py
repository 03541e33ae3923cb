"""Values that are not finite. Where they arise is wrong; what is computed from them cannot be judged, and is not right.

An op can be judged where the right op gives a finite value on the inputs that were recorded. Where it does not, an
input is NaN or Inf, or float32 overflows: that place is open.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llamadiff.judge.measurement import TapMeasurement

Array = NDArray[Any]


def open_places(right: Array, masks: bool) -> Array | None:
    """Where a tap cannot be judged: flags in its shape; None if it can be everywhere.

    ``masks``: -Inf is a value like any other, as where a graph hides keys or experts.
    """
    judged = np.isfinite(right) | (masks & (right == -np.inf))
    return None if judged.all() else ~judged


def restrict_to_finite(
    measured: TapMeasurement, recorded: Array, right: Array, opened: Array | None, axis: int
) -> TapMeasurement:
    """What was measured in the places that are not open, and how many values are not finite where the right ones are;
    both arrays are zero in the other places. ``axis`` runs over tokens.
    """
    broken = ~np.isfinite(recorded) & np.isfinite(right)
    if broken.any():
        measured = _broken(measured, recorded, right, broken, axis)
    if opened is None:
        return measured
    rows = _rows(opened, axis)
    whole, errors = np.asarray(rows.all(axis=1)), measured.per_token
    return replace(
        measured,
        nmse=float("nan") if whole.all() else measured.nmse,
        per_token=tuple(float("nan") if gone else error for error, gone in zip(errors, whole, strict=True)),
        opened=int(opened.sum()),
        open_tokens=tuple(int(row) for row in np.flatnonzero(rows.any(axis=1))),
    )


def _broken(measured: TapMeasurement, recorded: Array, right: Array, broken: Array, axis: int) -> TapMeasurement:
    """The same with the first of the values that are not finite as the worst one."""
    index = tuple(int(i) for i in np.unravel_index(int(broken.argmax()), broken.shape))
    rows = np.asarray(_rows(broken, axis).any(axis=1))
    return replace(
        measured, nmse=float("inf"), token=index[axis], index=index,
        expected=float(right[index]), recorded=float(recorded[index]), not_finite=int(broken.sum()),
        per_token=tuple(float("inf") if bad else error for error, bad in zip(measured.per_token, rows, strict=True)),
    )  # fmt: skip


def _rows(flags: Array, axis: int) -> Array:
    """[row, value]."""
    return np.moveaxis(flags, axis, 0).reshape(flags.shape[axis], -1)
