"""Columns of cells and lines of them: which fit a width, and where each cell goes. Knows nothing of comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from rich.cells import cell_len
from rich.text import Text


@dataclass(frozen=True)
class Column:
    """A title and one cell a line (None: nothing there); ``rank`` 0 always stays, the largest is dropped first."""

    title: str
    cells: Sequence[Text | None]
    rank: int = 0
    left: bool = False

    @cached_property
    def width(self) -> int:
        return max([cell_len(self.title), *(cell.cell_len for cell in self.cells if cell is not None)])

    def pad_cell(self, cell: Text | None) -> Text:
        """The cell at the column's width."""
        cell = cell.copy() if cell is not None else Text()
        room = self.width - cell.cell_len
        if self.left:
            cell.pad_right(room)
        else:
            cell.pad_left(room)
        return cell


def width_of(columns: Sequence[Column], gap: int) -> int:
    """The cells that a line of these columns takes."""
    return sum(column.width + gap for column in columns) - gap if columns else 0


def fit_columns(columns: Sequence[Column], width: int, gap: int) -> list[Column]:
    """The columns without those of the largest ranks, until the rest fits (or only rank 0 is left)."""
    kept = list(columns)
    while kept and width_of(kept, gap) > width:
        last = max(column.rank for column in kept)
        if last == 0:
            break
        kept = [column for column in kept if column.rank < last]
    return kept


def titles(columns: Sequence[Column], gap: int) -> Text:
    """The line of titles."""
    return Text(" " * gap).join(column.pad_cell(Text.assemble((column.title, "underline"))) for column in columns)


def line(columns: Sequence[Column], number: int, gap: int) -> Text:
    """The line of cells ``number``."""
    return Text(" " * gap).join(column.pad_cell(column.cells[number]) for column in columns)


def table(columns: Sequence[Column], width: int, gap: int = 2) -> list[Text]:
    """Titles and lines of the columns that fit."""
    kept = fit_columns(columns, width, gap)
    count = max((len(column.cells) for column in kept), default=0)
    return [titles(kept, gap), *(line(kept, number, gap) for number in range(count))]
