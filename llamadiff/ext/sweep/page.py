"""A sweep's rows as a summary: a line for each model, candidate and settings; what is not right in full. Computes
nothing but counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.text import Text

from llamadiff.ext.sweep.case import SweepRow
from llamadiff.ext.sweep.run import Sweep
from llamadiff.judge.verdict import is_right
from llamadiff.report.github import code, prose, table
from llamadiff.report.terminal.escape import escape_line, quote, tiny
from llamadiff.report.terminal.page import STRONG, Page

TITLES = ("model", "candidate", "settings", ">cases", ">right", ">wrong", ">refused", ">worst own", ">worst KL", ">s")
RANKS = (0, 0, 1, 0, 0, 0, 0, 3, 2, 4)
_TOLD = 40  # rows that are not right


def _groups(rows: Iterable[SweepRow], key: Callable[[SweepRow], Hashable]) -> list[list[SweepRow]]:
    """The rows that have something in common, in the order of their first ones."""
    found: dict[Hashable, list[SweepRow]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return list(found.values())


def _way(row: SweepRow) -> tuple[str, str, str]:
    return row.model, row.candidate, _settings(row)


def _settings(row: SweepRow) -> str:
    """Its settings, with the tokens that it generates."""
    return ",".join(filter(None, (row.settings, f"n_predict={row.n_predict}" if row.n_predict else "")))


def _summed_up(sweep: Sweep) -> list[tuple[str, ...]]:
    """A line of cells for each model, candidate and settings."""
    return [_cells(rows) for rows in _groups(sweep.rows, _way)]


def _cells(rows: Sequence[SweepRow]) -> tuple[str, ...]:
    right, refused = sum(is_right(row.verdict) for row in rows), sum(bool(row.refused) for row in rows)
    model, candidate, way = _way(rows[0])
    counts = (len(rows), right, len(rows) - right - refused, refused)
    worst, kl = (_largest([getattr(row, name) for row in rows]) for name in ("worst", "kl"))
    seconds = f"{median(row.seconds for row in rows):.1f}"
    return (Path(model).name, _candidate(candidate), way or "-", *map(str, counts), worst, kl, seconds)


def _largest(values: Sequence[float]) -> str:
    known = [value for value in values if math.isfinite(value)]
    return tiny(max(known)) if known else ""


def _candidate(candidate: str) -> str:
    """A file by its name alone."""
    return Path(candidate).name if candidate.endswith(".gguf") else candidate or "llama.cpp"


def _not_right(sweep: Sweep) -> list[list[SweepRow]]:
    """Rows that are not right for one reason: of one model, candidate and settings, whatever the prompt."""
    wrong = [row for row in sweep.rows if not is_right(row.verdict)]
    return _groups(wrong, lambda row: (*_way(row), row.verdict, _reason(row)))[:_TOLD]


def _prompts(rows: Sequence[SweepRow]) -> str:
    others = len(rows) - 1
    more = f" and {others} more case{'s' * (others > 1)}" if others else ""
    return f"{quote(rows[0].prompt, 40)}{more}"


def _reason(row: SweepRow) -> str:
    """What is wrong, or why it could not be told."""
    return row.refused.removeprefix(f"{row.model}: ") or row.headline


def headline(sweep: Sweep) -> str:
    """How many cases are right, and where the rows are."""
    right = sum(is_right(row.verdict) for row in sweep.rows)
    kept = f", {sweep.kept} of them were there before, of the same files" if sweep.kept else ""
    said = f"{right} of {len(sweep.rows)} cases are right{kept}; rows in {sweep.folder}"
    again = "; nothing was run: remove that directory, or give another with --out, to run them again"
    return said + again * (sweep.kept == len(sweep.rows))


def name_of(row: SweepRow) -> str:
    """A case by its model, its candidate and its settings."""
    return " ".join(filter(None, (Path(row.model).name, _candidate(row.candidate), _settings(row))))


def line_of(row: SweepRow, done: int, of: int) -> str:
    """One line for a case that has just been done."""
    what = row.refused or row.headline
    parts = (Path(row.model).name, _candidate(row.candidate), _settings(row))
    name = " ".join([*(escape_line(part, 40) for part in parts if part), quote(row.prompt, 30)])
    return f"{done}/{of}  {row.verdict.upper():9} {name}  {row.seconds:.1f} s  {escape_line(what, 90)}"


def print_sweep(sweep: Sweep, console: Console) -> None:
    """The summary on a terminal."""
    page = Page(console)
    page.table(TITLES, _summed_up(sweep), RANKS, 44)
    page.blank()
    for rows in _not_right(sweep):
        said = f"{name_of(rows[0])}; prompt: {_prompts(rows)}; {_reason(rows[0])}"
        page.paragraph(page.badge(rows[0].verdict), page.data(said, 600))
    for line in sweep.concerns:
        page.paragraph("note  ", page.data(line, 600))
    page.paragraph(page.badge(sweep.verdict), Text(page.data(headline(sweep), 400), STRONG))


def sweep_to_markdown(sweep: Sweep) -> str:
    """The summary, then what is not right."""
    lines = [tuple(code(cell, 80) if cell else "" for cell in cells) for cells in _summed_up(sweep)]
    parts = [f"### {sweep.verdict.upper()}: {prose(headline(sweep), 400)}", table(TITLES, lines)]
    wrong = [
        (rows[0].verdict, code(Path(rows[0].model).name), code(_candidate(rows[0].candidate)),
         code(_settings(rows[0]) or "-"), code(_prompts(rows), 80), prose(_reason(rows[0]), 300))
        for rows in _not_right(sweep)
    ]  # fmt: skip
    if wrong:
        parts.append("**Not right**\n\n" + table(("", "model", "candidate", "settings", "prompt", ""), wrong))
    if sweep.concerns:
        parts.append("\n".join(f"- {prose(line, 600)}" for line in sweep.concerns))
    return "\n\n".join(parts) + "\n"
