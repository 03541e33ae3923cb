"""What a kernel gave on an op and on the cases around it: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llamadiff.judge.verdict import UNCHECKED, WRONG, is_right, worst_of


@dataclass(frozen=True)
class Place:
    """Where a result is wrong: how many of its ``count`` values; its first wrong row and column, and where the others
    are, if not everywhere; the value that is furthest beyond its limit.

    ``index`` is [ne3, ne2, ne1, ne0] of the worst one, ``rows`` and ``columns`` count through all.
    """

    wrong: int
    count: int
    row: int
    column: int
    rows: str
    columns: str
    index: tuple[int, ...]
    found: float
    right: float
    error: float
    limit: float


@dataclass(frozen=True)
class CaseRun:
    """One case. ``problem``: why there is no result; ``next_step``: what to do about it. ``path``: where it is kept."""

    number: int
    title: str
    sizes: Mapping[str, int]
    values: str
    inputs: str
    n_values: int
    verdict: str
    arithmetic: str = ""
    place: Place | None = None
    problem: str = ""
    next_step: str = ""
    path: Path | None = None

    @property
    def is_right(self) -> bool:
        return is_right(self.verdict)


@dataclass(frozen=True)
class KernelRun:
    """A kernel on one saved op. ``kernel`` is what was given, ``label`` what it is called in a sentence.

    ``common``: what the wrong cases have in common that no right one has.
    """

    path: Path
    name: str
    op: str
    kernel: str
    label: str
    seed: int
    cases: tuple[CaseRun, ...]
    common: str = ""

    @property
    def verdict(self) -> str:
        return worst_of(case.verdict for case in self.cases)

    @property
    def wrong(self) -> list[CaseRun]:
        """Those that are wrong, the smallest first."""
        return sorted((case for case in self.cases if case.verdict == WRONG), key=lambda case: case.n_values)

    @property
    def unjudged(self) -> list[CaseRun]:
        """Those of which the kernel gave no result, and said so."""
        return [case for case in self.cases if case.verdict == UNCHECKED]
