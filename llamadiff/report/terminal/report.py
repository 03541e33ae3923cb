"""Comparison -> a terminal: the finding first, its evidence under it. Computes nothing; it lays out."""

from __future__ import annotations

import os
import sys
from typing import IO

from rich.console import Console
from rich.text import Text

from llamadiff.comparison.result import Comparison
from llamadiff.report.loss import (
    CHOICE_TITLES,
    LAYER_TITLES,
    STATISTIC_TITLES,
    TENSOR_TITLES,
    Cells,
    choice_cells,
    layer_cells,
    statistic_cells,
    tensor_cells,
)
from llamadiff.report.terminal.columns import Column, table
from llamadiff.report.terminal.details import put_absences, put_details, put_names
from llamadiff.report.terminal.finding import put_causes, put_fixes, put_headline, put_last_line, put_next_steps
from llamadiff.report.terminal.footnotes import put_notes
from llamadiff.report.terminal.logits import put_logits
from llamadiff.report.terminal.page import Page
from llamadiff.report.terminal.subject import put_preflight, put_subject
from llamadiff.report.terminal.tap_map import put_map
from llamadiff.report.terminal.tap_table import put_taps

PIPED_WIDTH = 120


def make_console(file: IO[str] | None = None, width: int | None = None) -> Console:
    """A console that obeys no markup; where it is no terminal, 120 cells wide unless COLUMNS says otherwise."""
    file = file if file is not None else sys.stdout
    console = Console(file=file, width=width, markup=False, emoji=False, highlight=False)
    if width is None and not console.is_terminal:
        columns = os.environ.get("COLUMNS", "")
        console.width = int(columns) if columns.isdecimal() and int(columns) > 0 else PIPED_WIDTH
    return console


def say(words: str) -> None:
    """Print words of our own, broken between words."""
    make_console().print(Text(words))


def render(comparison: Comparison, console: Console, full: bool = False) -> None:
    """Print a comparison. ``full``: every layer, token and cause, and how it was computed."""
    page = Page(console)
    put_headline(page, comparison, full)
    page.blank()
    put_fixes(page, comparison, full)
    put_subject(page, comparison, full)
    put_preflight(page, comparison, full)
    put_loss(page, comparison, full)
    if comparison.rows:
        page.blank()
        put_map(page, comparison, full)
        put_taps(page, comparison, full)
        put_notes(page, comparison, full)
    if full:
        put_causes(page, comparison)
    if comparison.logits is not None:
        page.blank()
        put_logits(page, comparison, full)
    put_absences(page, comparison, full)
    put_names(page, comparison)
    put_next_steps(page, comparison)
    if full:
        put_details(page, comparison)
    put_last_line(page, comparison)


def render_causes(comparison: Comparison, console: Console) -> None:
    """Print the finding, the causes and what to do."""
    page = Page(console)
    put_headline(page, comparison, full=True)
    page.blank()
    put_fixes(page, comparison, full=True)
    put_causes(page, comparison)
    put_next_steps(page, comparison)


def put_loss(page: Page, comparison: Comparison, full: bool) -> None:
    """Print it, where two files were compared."""
    loss = comparison.loss
    if loss is None:
        return
    page.blank()
    _put(page, TENSOR_TITLES, tensor_cells(loss))
    _put(page, CHOICE_TITLES, choice_cells(loss))
    if full or loss.text is not None:
        _put(page, STATISTIC_TITLES, statistic_cells(loss))
    if full:
        _put(page, LAYER_TITLES, layer_cells(loss))


def _put(page: Page, titles: tuple[str, ...], cells: Cells) -> None:
    if not cells:
        return
    columns = [
        Column(title.removeprefix(">"), [Text(page.data(cell)) for cell in each], rank, not title.startswith(">"))
        for rank, (title, each) in enumerate(zip(titles, zip(*cells, strict=True), strict=True))
    ]
    for line in table(columns, page.width):
        page.put(line)
    page.blank()
