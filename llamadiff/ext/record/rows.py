"""A tap's rows, as they were found in a program's memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from llamadiff.ext.record.orders import Order
from llamadiff.ext.record.search import Found
from llamadiff.trace.taps import Tap

Array = NDArray[Any]


@dataclass(frozen=True)
class Rows:
    """A tap's rows: as they were found or, where they were not, computed.

    ``places`` of those that were found, by row; ``near``: what is like others, and may be the program's own or chance.
    ``order``: that in which the program has the values of a row, where it is not llama.cpp's.
    """

    tap: Tap
    values: Array
    places: Mapping[int, Found] = field(default_factory=dict)
    near: Mapping[int, Found] = field(default_factory=dict)
    order: Order | None = None

    def close(self, limit: float) -> set[int]:
        """Those that are what was sought, but for rounding."""
        return {row for row, each in self.places.items() if each.nmse <= limit}
