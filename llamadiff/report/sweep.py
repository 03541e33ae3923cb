"""A sweep's rows as a summary: a line for each model, candidate and settings; what is not right in full. Computes
nothing but counts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.text import Text

from llamadiff.numerics import tolerances
from llamadiff.report.github import code, prose, table
from llamadiff.report.terminal.columns import Column
from llamadiff.report.terminal.columns import table as columns_table
from llamadiff.report.terminal.escape import quoted, shown, tiny
from llamadiff.report.terminal.page import Page
from llamadiff.report.terminal.styles import STRONG, badge
from llamadiff.sweep.case import SweepRow
from llamadiff.sweep.run import Sweep

TITLES = ("model", "candidate", "settings", ">cases", ">right", ">wrong", ">refused", ">worst own", ">worst KL", ">s")
_TOLD = 40  # rows that are not right
_RIGHT = (tolerances.MATCH, tolerances.NOISE)


@dataclass(frozen=True)
class _SummedUp:
    """The rows of one model, candidate and settings."""

    name: tuple[str, str, str]
    rows: Sequence[SweepRow]

    def cells(self) -> tuple[str, ...]:
        right = sum(row.verdict in _RIGHT for row in self.rows)
        refused = sum(bool(row.refused) for row in self.rows)
        model, candidate, way = self.name
        counts = (len(self.rows), right, len(self.rows) - right - refused, refused)
        worst, kl = (_largest([getattr(row, name) for row in self.rows]) for name in ("worst", "kl"))
        seconds = f"{median(row.seconds for row in self.rows):.1f}"
        return (Path(model).name, _candidate(candidate), way or "-", *map(str, counts), worst, kl, seconds)


def _largest(values: Sequence[float]) -> str:
    known = [value for value in values if math.isfinite(value)]
    return tiny(max(known)) if known else ""


def _candidate(candidate: str) -> str:
    """A file by its name alone."""
    return Path(candidate).name if candidate.endswith(".gguf") else candidate or "llama.cpp"


def _summed_up(sweep: Sweep) -> list[_SummedUp]:
    found: dict[tuple[str, str, str], list[SweepRow]] = {}
    for row in sweep.rows:
        found.setdefault((row.model, row.candidate, row.settings), []).append(row)
    return [_SummedUp(name, rows) for name, rows in found.items()]


@dataclass(frozen=True)
class _NotRight:
    """Rows that are not right for one reason: of one model, candidate and settings, whatever the prompt."""

    rows: Sequence[SweepRow]

    @property
    def first(self) -> SweepRow:
        return self.rows[0]

    @property
    def prompts(self) -> str:
        others = len(self.rows) - 1
        more = f" and {others} more case{'s' * (others > 1)}" if others else ""
        return f"{quoted(self.first.prompt, 40)}{more}"


def _not_right(sweep: Sweep) -> list[_NotRight]:
    found: dict[tuple[str, ...], list[SweepRow]] = {}
    for row in sweep.rows:
        if row.verdict not in _RIGHT:
            found.setdefault((row.model, row.candidate, row.settings, row.verdict, _reason(row)), []).append(row)
    return [_NotRight(rows) for rows in found.values()]


def _reason(row: SweepRow) -> str:
    """What is wrong, or why it could not be told."""
    return row.refused.removeprefix(f"{row.model}: ") or row.headline


def headline(sweep: Sweep) -> str:
    """How many cases are right, and where the rows are."""
    right = sum(row.verdict in _RIGHT for row in sweep.rows)
    kept = f", {sweep.kept} of them were there before" if sweep.kept else ""
    return f"{right} of {len(sweep.rows)} cases are right{kept}; rows in {sweep.folder}"


def line_of(row: SweepRow, done: int, of: int) -> str:
    """One line for a case that has just been done."""
    what = row.refused or row.headline
    name = " ".join(filter(None, (Path(row.model).name, _candidate(row.candidate), row.settings)))
    return f"{done}/{of}  {row.verdict.upper():9} {shown(name, 60)}  {row.seconds:.1f} s  {shown(what, 90)}"


def print_sweep(sweep: Sweep, console: Console) -> None:
    """The summary on a terminal."""
    page = Page(console)
    cells = [group.cells() for group in _summed_up(sweep)]
    ranks = (0, 0, 1, 0, 0, 0, 0, 3, 2, 4)
    columns = [
        Column(title.removeprefix(">"), [Text(page.data(cell, 44)) for cell in each], rank, not title.startswith(">"))
        for title, each, rank in zip(TITLES, zip(*cells, strict=True), ranks, strict=True)
    ]
    for line in columns_table(columns, page.width):
        page.put(line)
    page.blank()
    for each in _not_right(sweep)[:_TOLD]:
        label = badge(page, each.first.verdict)
        page.paragraph(label, Text(page.data("; ".join(_told(each)), 600)))
    page.paragraph(badge(page, sweep.verdict), Text(page.data(headline(sweep), 400), STRONG))


def _told(each: _NotRight) -> Iterator[str]:
    """What is not right, in words."""
    row = each.first
    yield " ".join(filter(None, (Path(row.model).name, _candidate(row.candidate), row.settings)))
    yield f"prompt: {each.prompts}"
    yield _reason(row)


def sweep_to_markdown(sweep: Sweep) -> str:
    """The summary, then what is not right."""
    lines = [tuple(code(cell, 80) if cell else "" for cell in group.cells()) for group in _summed_up(sweep)]
    parts = [f"### {sweep.verdict.upper()}: {prose(headline(sweep), 400)}", table(TITLES, lines)]
    wrong = [
        (each.first.verdict, code(Path(each.first.model).name), code(_candidate(each.first.candidate)),
         code(each.first.settings or "-"), code(each.prompts, 80), prose(_reason(each.first), 300))
        for each in _not_right(sweep)[:_TOLD]
    ]  # fmt: skip
    if wrong:
        parts.append("**Not right**\n\n" + table(("", "model", "candidate", "settings", "prompt", ""), wrong))
    return "\n\n".join(parts) + "\n"
