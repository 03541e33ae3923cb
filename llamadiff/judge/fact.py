"""What is said of an error: a true statement each, which slices make. Plain data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Fact:
    """One true statement about an error: its kind, the words that follow "in TAP:", and the values that it states."""

    kind: str
    says: str
    values: tuple[Any, ...] = ()


# Kinds of facts that say what a tap holds instead, and not only where it is wrong.
ANSWERS = {
    "zero", "equals", "axes", "rows", "channel order", "sorted", "ratio", "offset", "vector", "turns", "part zero",
    "part factor", "part of another",
}  # fmt: skip

# Kinds of facts that say how an op rounds: of an error that rounding may leave, they make no mistake.
ROUNDINGS = {"weight in 16 bits", "norm in 16 bits", "rounded angles", "rounded frequencies"}


def runs_of(numbers: Iterable[int]) -> list[list[int]]:
    """Ascending numbers as runs of neighbours."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs
