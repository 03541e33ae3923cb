"""Sums that are kept in float16: what a slice that follows them is asked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from llamaref.sums import Matrix
from numpy.typing import NDArray

from llamadiff import plugins

Array = NDArray[Any]


class Kernel(Protocol):
    """How one product is added, rows in their batches."""

    def accumulate(self, y: Array, parts: Iterable[Matrix]) -> float:
        """Add its parts into a product, as many outputs as time allows -> the NMSE that the others have."""

    def orders_shown(self, y: Array, parts: Iterable[Matrix]) -> set[str]:
        """The ways in which the first part of a product y was added, as a sample of each batch shows."""


class SumsInHalf(Protocol):
    """The ways to add float16's numbers in it."""

    @property
    def ways(self) -> Sequence[str]:
        """Their names, the likelier first."""

    def kernel(self, sums: str, kind: str, edges: Sequence[int], start: int, by_row: bool) -> Kernel:
        """What adds products of a kind of operands, rows from the ``start``-th on; ``edges``: of batches."""


def half_sums() -> SumsInHalf | None:
    """What follows such sums; None where no slice does."""
    return plugins.ask_first(lambda each: each.half_sums())
