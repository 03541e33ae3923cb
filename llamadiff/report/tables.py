"""Tables of what slices found, which every format shows alike."""

from __future__ import annotations

from collections.abc import Sequence

from llamadiff import plugins
from llamadiff.result.comparison import Comparison

Table = tuple[str, tuple[str, ...], Sequence[tuple[str, ...]]]  # its name, titles (> of numbers), cells


def tables_of(result: Comparison, full: bool = True) -> list[Table]:
    """Those of all slices; ``full``: with what a short report leaves out."""
    return [table for tables in plugins.ask_all(lambda each: each.tables(result, full)) for table in tables]
