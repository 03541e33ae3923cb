"""WeightReport -> JSON, CSV or Markdown."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict
from typing import Any

from llamadiff.report.github import prose, table
from llamadiff.report.json import in_json
from llamadiff.weights.result import TensorRow, WeightReport

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
