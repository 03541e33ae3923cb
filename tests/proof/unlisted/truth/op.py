"""A tap as it was recorded and as it should be: what checks of sentences are given."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from proof.strangers.engine import is_scores
from proof.strangers.model import File

Array = np.ndarray


Array = np.ndarray
SLACK = 1e-6  # of a tensor's rms, that no check asks for


@dataclass(frozen=True)
class Op:
    """A tap as an engine recorded it, ``right`` as a right engine computes it from the same inputs, and all taps."""

    file: File
    tap: str
    recorded: Array
    right: Array
    taps: Mapping[str, Array]
    fact: Any
    rows: tuple[int, ...] | None = None  # of which alone something is said

    @property
    def r(self) -> Array:
        return np.asarray(self.recorded, np.float64)

    @property
    def e(self) -> Array:
        return np.asarray(self.right, np.float64).reshape(self.recorded.shape)

    @property
    def layer(self) -> int:
        return int(self.tap.rsplit("-", 1)[1])

    @property
    def word(self) -> str:
        return self.tap.rsplit("-", 1)[0]

    def of(self, word: str, shape: Any = None) -> Array:
        """A tap of this layer, or of none."""
        name = word if word in self.taps else f"{word}-{self.layer}"
        x = np.asarray(self.taps[name], np.float64)
        return x if shape is None else x.reshape(shape)

    def are(self, values: Array, room: float = 0.0) -> bool:
        """Whether the recorded values are these: none is off by more than half of the error's size."""
        r, e, values = self.r, self.e, values.reshape(self.recorded.shape)
        if is_scores(self.tap):
            seen = np.tri(r.shape[1], r.shape[2], dtype=bool)
            r, e, values = (np.where(seen, x, 0.0) for x in (r, e, values))
        if self.rows is not None:
            r, e, values = (np.take(x, self.rows, int(is_scores(self.tap))) for x in (r, e, values))
        size = np.sqrt(np.mean(e**2)) or 1.0
        error = np.sqrt(np.mean((r - e) ** 2))
        return bool(np.abs(r - values).max() <= 0.5 * error + (SLACK + room) * size)


def numbers(text: str) -> list[int]:
    runs = re.findall(r"(\d+)(?: to (\d+))?", text)
    return [n for first, last in runs for n in range(int(first), int(last or first) + 1)]
