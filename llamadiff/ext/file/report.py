"""A report of weights on a terminal, and as JSON, CSV and Markdown. Computes nothing."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from llamadiff.ext.file.result import TensorRow, WeightReport
from llamadiff.judge.verdict import MATCH, WRONG
from llamadiff.report.github import prose, table
from llamadiff.report.json import in_json
from llamadiff.report.terminal.columns import Column
from llamadiff.report.terminal.escape import number, tiny
from llamadiff.report.terminal.page import STRONG, Page
from llamadiff.result.oddity import Oddity

SCHEMA = "llamadiff.weights/1"
COLUMNS = ("tensor", "type", "shape", "bytes", "rms", "mean", "min", "max", "zeros", "nan", "inf", "decoders")
COMPARED = ("verdict", "made", "nmse", "snr_db", "cosine", "cost", "place")


def weights_to_json(report: WeightReport) -> str:
    """One object; a number that is not finite is null."""
    entries = {
        "schema": SCHEMA, "verdict": report.verdict, "summary": report.summary, "model": report.model,
        "other": report.other, "findings": report.findings, "suspicions": report.suspicions, "notes": report.notes,
        "unchecked": report.unchecked, "tensors": [_row(row) for row in report.rows], "timing": report.timing,
    }  # fmt: skip
    return in_json(entries)


def _row(row: TensorRow) -> dict[str, Any]:
    values = asdict(row)
    if row.distance is not None:
        values["distance"]["snr"] = row.distance.snr
    return values


def weights_to_csv(report: WeightReport) -> str:
    """A line for each tensor."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_titles(report))
    writer.writerows(_cells(row, report) for row in report.rows)
    return text.getvalue()


def _titles(report: WeightReport) -> tuple[str, ...]:
    return COLUMNS + (COMPARED if report.other is not None else ())


def _cells(row: TensorRow, report: WeightReport) -> list[object]:
    s, d = row.stats, row.distance
    moments = (s.rms, s.mean, s.min, s.max, s.zeros, s.nan, s.inf) if s is not None else ("",) * 7
    cells = [row.name, row.type, "x".join(map(str, row.shape)), row.n_bytes, *moments, row.decoders]
    if report.other is not None:
        apart = (d.nmse, d.snr, d.cosine) if d is not None else ("", "", "")
        cells += [row.verdict, row.made, *apart, row.cost if row.cost is not None else "", d.place if d else ""]
    return cells


def weights_to_markdown(report: WeightReport) -> str:
    """The sentence, what was found, and the table."""
    lines = [f"**{report.verdict.upper()}** {prose(report.summary)}", ""]
    for title, oddities in (("Findings", report.findings), ("Suspicious", report.suspicions)):
        if oddities:
            lines += [f"## {title}", "", *(f"- {prose(o.where)}: {prose(o.says)}" for o in oddities), ""]
    said = (*report.unchecked, *report.notes)
    if said:
        lines += ["## Notes", "", *(f"- {prose(note)}" for note in said), ""]
    titles = _titles(report)
    lines += ["## Tensors", "", table(titles, ([_cell(cell) for cell in _cells(row, report)] for row in report.rows))]
    return "\n".join(lines) + "\n"


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else prose(str(value))


MOST_TIMES = 1e6  # its cost, that a tensor's error is written out as
MOST = 100  # findings of a kind that are shown; all are in the other formats
DECODERS = {"bit-equal": "=", "plain numbers": ""}


def render_weights(report: WeightReport, console: Console) -> None:
    """Print a report of weights."""
    page = Page(console)
    page.paragraph(page.badge(report.verdict), Text(page.data(report.summary, 4000), STRONG))
    page.blank()
    _put_oddities(page, "wrong", report.findings)
    _put_oddities(page, "suspicious", report.suspicions)
    for note in (*report.unchecked, *report.notes):
        page.paragraph("note  ", page.data(note, 1000))
    page.blank()
    if report.rows:
        page.columns(_columns(page, report))


def _put_oddities(page: Page, word: str, oddities: Sequence[Oddity]) -> None:
    for oddity in oddities[:MOST]:
        body = Text.assemble((page.data(oddity.where), STRONG), f": {page.data(oddity.says, 1000)}")
        page.paragraph(Text(f"{word}  "), body)
    if len(oddities) > MOST:
        page.put(Text(f"and {len(oddities) - MOST} more that are {word}; -o FILE.json has all"))


def _columns(page: Page, report: WeightReport) -> list[Column]:
    rows = report.rows

    def column(title: str, cell: Callable[[TensorRow], str], rank: int = 0, left: bool = False) -> Column:
        return Column(title, [Text(page.data(cell(row))) for row in rows], rank, left)

    def moment(title: str, name: str, rank: int) -> Column:
        return column(title, lambda row: "-" if row.stats is None else number(getattr(row.stats, name)), rank)

    columns = [
        column("tensor", lambda row: row.name, left=True), column("type", lambda row: row.type, left=True),
        column("shape", lambda row: "x".join(map(str, row.shape)), 3),
    ]  # fmt: skip
    if report.other is not None:
        columns += _compared(page, rows, column)
    columns += [moment("rms", "rms", 3), moment("mean", "mean", 4), moment("min", "min", 5), moment("max", "max", 5)]
    columns += [moment("zeros", "zeros", 6)]
    if report.other is None:
        columns += [column("decoders", lambda row: DECODERS.get(row.decoders, row.decoders), 3)]
    return columns


def _compared(page: Page, rows: Sequence[TensorRow], column: Callable[..., Column]) -> list[Column]:
    verdicts = [Text() if row.verdict == MATCH else Text(row.verdict, page.style_of(row.verdict)) for row in rows]

    def above(row: TensorRow) -> str:
        if row.distance is None or not row.cost:
            return "-"
        times = row.distance.nmse / row.cost
        return f"{times:.2f}x" if times < MOST_TIMES else f"{times:.0e}x"

    return [
        Column("", verdicts, left=True),
        column("nmse", lambda row: "-" if row.distance is None else tiny(row.distance.nmse)),
        column("dB", lambda row: "-" if row.distance is None else number(row.distance.snr), 3),
        column("of its cost", above, 2),
        column("transform", lambda row: row.made.rpartition(", ")[2] if ", " in row.made else "", 1, left=True),
        column("where", lambda row: row.distance.place if row.distance is not None and row.verdict == WRONG else "", 4),
    ]
