"""K and V of the tokens that are not judged, beside llama.cpp's: attention reads them, so all of them must be right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from llamadiff.ext.rows.choose import in_words
from llamadiff.judge.preflight.checks import Check
from llamadiff.judge.verdict import of_check
from llamadiff.trace.reader import Trace
from llamadiff.trace.taps import layer_of

Array = NDArray[np.float64]
NAME = "cache rows of tokens that are not judged"
TIMES, LEAST = 100.0, 1e-6  # of the worst row that is judged, and NMSE, from where on another one is strange
OTHERS = 0.5  # NMSE beyond which a row is another one: in later layers other experts may be chosen


def strange_rows(kept: Mapping[str, Trace], judged: Sequence[int]) -> Check | None:
    """The first cache with rows that differ from llama.cpp's far more than all that are judged do.

    Those of layer 0 go by nothing but a token and its position; later ones may drift, and are no more than suspect.
    """
    for name in kept["candidate"]:
        count = min(len(side[name]) for side in kept.values())
        errors = _errors(*(kept[side][name][:count] for side in ("candidate", "baseline")))
        worst, first = float(errors[[row for row in judged if row < count]].max()), layer_of(name) == 0
        far = np.flatnonzero(errors > max(TIMES * worst, LEAST if first else OTHERS))
        if len(far):
            return Check(
                NAME, of_check(fault=True, is_known=first),
                f"{name} of tokens {in_words([int(row) for row in far], 5)} differs from llama.cpp's by an NMSE of up "
                f"to {errors[far].max():.1e}, that of tokens that are judged by {worst:.1e}",
            )  # fmt: skip
    return None


def _errors(found: Array, right: Array) -> Array:
    """NMSE of each row."""
    mine, theirs = (np.asarray(side, np.float32).reshape(len(side), -1) for side in (found, right))
    errors = np.square(mine - theirs).mean(axis=1) / np.maximum(np.square(theirs).mean(axis=1), 1e-30)
    return np.nan_to_num(np.asarray(errors, np.float64), nan=np.inf)
