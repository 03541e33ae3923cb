"""Comparison -> a table of taps as CSV: one line a tap, in graph order."""

from __future__ import annotations

from llamadiff.comparison.result import Comparison
from llamadiff.report.formats import About


def to_csv(comparison: Comparison, about: About) -> str:
    """The table as text. It says nothing of how it was made: CSV has no place for that."""
    text: str = comparison.frame().to_csv(index=False)
    return text
