"""Constants that bugs have: where each is looked for, and what is said of the one that is found; of taps and nodes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Sought:
    """A positive constant between ``low`` and ``high``: tried in so many ``steps`` first, and at familiar values.

    ``says`` is told the value that was found and the model's own.
    """

    low: float
    high: float
    says: Callable[[float, float], str]
    familiar: tuple[float, ...] = ()
    steps: int = 80


def _by_twos(ratio: float) -> str:
    """What a scale tells that makes powers of two of those of e."""
    return ", as where 2^x stands for e^x" if abs(ratio / math.log(2) - 1) < 1e-3 else ""


EPSILON = Sought(
    1e-13, 1.0, lambda value, own: f"uses epsilon {value:.3g}; the file says {own:.3g}",
    (1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2),
)  # fmt: skip
ROPE_BASE = Sought(
    10.0, 1e9, lambda value, own: f"uses base {value:.6g}; the file says {own:.6g}",
    (1e3, 1e4, 1e5, 1.5e5, 2.5e5, 5e5, 1e6, 5e6, 8e6, 1e7), 400,
)  # fmt: skip
ROPE_FACTOR = Sought(
    1 / 64, 64.0, lambda value, own: f"divides positions by {value:.4g}; the file says {own:.4g}",
    (0.25, 0.5, 2.0, 4.0, 8.0, 16.0, 32.0), 400,
)  # fmt: skip
SCORE_SCALE = Sought(
    1e-4, 100.0, lambda value, own: f"scales scores by {value:.5g}; the model by {own:.5g}{_by_twos(value / own)}",
    tuple(d**-0.5 for d in (32, 64, 80, 96, 128, 192, 256)),
)  # fmt: skip
SCORE_CAP = Sought(
    0.1, 1e4, lambda value, own: f"caps scores at {value:.4g}; this model has no softcap", (20.0, 30.0, 50.0)
)
LOGIT_CAP = Sought(0.5, 1e4, lambda value, own: f"caps logits at {value:.4g}; this model has no softcap", (30.0,), 40)
ROWS_FACTOR = Sought(
    1e-3, 1e3, lambda value, own: f"multiplies rows by {value:.6g}; this model does not", (0.5, 2.0)
)  # fmt: skip
FACTOR = Sought(1e-3, 1e3, lambda value, own: f"multiplies its result by {value:.6g}", (0.125, 0.5, 2.0, 8.0))
