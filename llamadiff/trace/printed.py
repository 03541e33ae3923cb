"""What a debug log prints of a run: numbers with as many digits as they have, and statistics of whole tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Number:
    """A printed number; ``slack`` is half a unit of its last digit: it may have been rounded by so much."""

    value: float
    slack: float


@dataclass(frozen=True)
class Printed:
    """What is known of a candidate that was read from a log, besides its values.

    ``slack``: by tap, how far each value may have been rounded; ``stated``: by tap, its statistics (rms, mean, min,
    max, norm); ``notes``: how the log was read, in words.
    """

    slack: Mapping[str, Array] = field(default_factory=dict)
    stated: Mapping[str, Mapping[str, Number]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
