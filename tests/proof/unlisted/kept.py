"""Mistakes in the rows of a cache as they are read, which scores and sums show: K and V themselves are right."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from proof.strangers.engine import Bug
from proof.unlisted.bugs import Unlisted

Array = np.ndarray
SMALL = 0.2494  # some way between two values of K, and of V
SIDES = {"K": ("kq-0", "read_keys"), "V": ("kqv_out-0", "read_values")}


def _part(axis: int, places: list[int], factor: float) -> Callable[[Array], Array]:
    """Some rows, heads or channels times a factor."""

    def changed(rows: Array) -> Array:
        out = np.moveaxis(rows.copy(), axis, 0)
        out[places] *= rows.dtype.type(factor)
        return np.moveaxis(out, 0, axis)

    return changed


def _plus(rows: Array) -> Array:
    """A bias that a channel of K or V does not have."""
    return rows + np.where(np.arange(rows.shape[-1]) == 3, 0.05, 0.0).astype(rows.dtype)


def _with_row_before(rows: Array) -> Array:
    return rows + rows.dtype.type(0.05) * np.concatenate([np.zeros_like(rows[:1]), rows[:-1]])


def _small_are_zero(rows: Array) -> Array:
    return np.where(abs(rows) < SMALL, rows.dtype.type(0), rows)


# name -> what becomes of the rows [key, head, dim], and what is said of it
MISTAKES: dict[str, tuple[Callable[[Array], Array], str]] = {
    "head": (_part(1, [0], 1.03), "it reads {}'s head 0 times 1.03"),
    "row": (_part(0, [5], 1.05), "it reads {}'s row 5 times 1.05"),
    "channels": (_part(2, [62, 63], 0.9), "it reads {}'s channels 62 and 63 times 0.9"),
    "bias": (_plus, "0.05 is added to {}'s channel 3, in all heads"),
    "leak": (_with_row_before, "0.05 times the row before is added to each row of {} that it reads"),
    "whole": (np.rint, "it reads {} rounded to the nearest whole number"),
    "cut": (np.trunc, "it reads {} rounded to whole numbers, towards zero"),
    "limit": (lambda rows: np.clip(rows, -2, 2), "it limits the values of {} to 2"),
    "small": (_small_are_zero, "it reads zeros for the values of {} that are below 0.2494"),
}


def _unlisted(side: str, name: str) -> Unlisted:
    (tap, reads), (change, says) = SIDES[side], MISTAKES[name]
    bug = Bug(f"{side}: {name}", {reads: lambda e, right, rows: change(right(rows)).astype(rows.dtype)})
    return Unlisted(bug.name, tap, says.format(side), bug)


KEPT = {f"{side}: {name}": _unlisted(side, name) for side in SIDES for name in MISTAKES}
