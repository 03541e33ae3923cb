"""The columns of the tap table in one spelling: what every line has, what layers have, what opened taps have."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from llamadiff.comparison.rows import Row
from llamadiff.judge.finding import Local
from llamadiff.numerics import tolerances
from llamadiff.numerics.metrics import Stats
from llamadiff.report.terminal.columns import Column
from llamadiff.report.terminal.escape import number, times, tiny
from llamadiff.report.terminal.page import VERDICTS, Page

CORE = 5  # columns up to this rank should stand in 80 cells; the others take what room is left
MARKS = {tolerances.MATCH: "·", tolerances.NOISE: "~", tolerances.WRONG: "✗", tolerances.UNCHECKED: "?"}
_DECADES = 16  # of a bar's scale; a cell is two


@dataclass(frozen=True)
class Line:
    """One line: a layer (its worst tap, its residual), a tap outside the layers, or a tap of the opened layer."""

    layer: int | None
    verdict: str
    baseline_off: bool
    worst: Row
    residual: Row
    opened: bool = False
    first: bool = False  # the first divergence itself


@dataclass(frozen=True)
class Spelling:
    """How a line is written: verdicts as words or marks, tap names with or without a layer that stands beside them."""

    words: bool = True
    full_names: bool = True
    mean_cells: int = 7


def shared_columns(page: Page, lines: Sequence[Line], spelling: Spelling) -> list[Column]:
    """What layers and opened taps both have: verdict, name, local error, drift."""
    return [
        _heading(page, lines, spelling),
        *_local(page, lines),
        *_drift(lines),
    ]


def _heading(page: Page, lines: Sequence[Line], spelling: Spelling) -> Column:
    """Layer, verdict and tap. A short name beside its layer's number takes the cells of a full name."""
    digits = max(len(str(line.layer)) if line.layer is not None else 0 for line in lines)
    verdicts = [_verdict(line, spelling.words) for line in lines]
    room = max(verdict.cell_len for verdict in verdicts) + 1
    written = []
    for line, verdict in zip(lines, verdicts, strict=True):
        layer = _layer(line, digits)
        name = line.worst.tap
        if not spelling.full_names:
            layer, name = (Text(), name) if line.opened else (layer, _word(line))
        padding = " " * (room - verdict.cell_len)
        written.append(Text.assemble(layer, verdict, padding, (page.data(name), _emphasis(line))))
    start = room + (digits + 1 if digits else 0)
    label = "layer " if digits else ""
    return Column(label.ljust(start) + "worst tap", written, left=True)


def _layer(line: Line, digits: int) -> Text:
    """A layer's number; beside an opened layer's taps, a rule that holds them together."""
    number = "│" if line.opened else "" if line.layer is None else str(line.layer)
    return Text(f"{number:>{digits}} " if digits else "", "dim" if line.opened else "")


def _word(line: Line) -> str:
    return line.worst.tap.removesuffix(f"-{line.layer}")


def _verdict(line: Line, words: bool) -> Text:
    if line.baseline_off and line.verdict != tolerances.WRONG:
        return Text("b off" if words else "b", "bold red")
    wrong, match = line.verdict == tolerances.WRONG, line.verdict == tolerances.MATCH
    word = (line.verdict.upper() if wrong else line.verdict) if words else MARKS[line.verdict]
    style = "dim" if match else "bold reverse red" if line.first else VERDICTS[line.verdict]
    return Text(word, style)


def _emphasis(line: Line) -> str:
    """Colour for what is not a match, bold for the first divergence: the eye should fall there."""
    if line.verdict == tolerances.MATCH:
        return ""
    return f"bold {VERDICTS[line.verdict]}" if line.first else VERDICTS[line.verdict]


def _local(page: Page, lines: Sequence[Line]) -> list[Column]:
    locals_ = [line.worst.local for line in lines]
    if not any(locals_):
        return []
    sizes = [Text(_size(x), _emphasis(line)) for x, line in zip(locals_, lines, strict=True)]
    arithmetics = [
        Text(page.data("" if x is None or x.arithmetic in (None, "F32") else x.arithmetic, 11)) for x in locals_
    ]
    columns = [Column("local", sizes)]
    return [*columns, Column("", arithmetics, rank=3, left=True)] if any(arithmetics) else columns


def _size(local: Local | None) -> str:
    """A local error, where anything could be judged."""
    return tiny(None if local is None or math.isnan(local.nmse) else local.nmse)


def _drift(lines: Sequence[Line]) -> list[Column]:
    drifts = [line.residual.drift for line in lines]
    ratios = [line.residual.ratio_to_noise for line in lines]
    noise = Column("noise", [Text(times(ratio)) for ratio in ratios], rank=2)
    return [
        Column("drift", [Text(tiny(drift.nmse if drift else None)) for drift in drifts], rank=1),
        Column("1e-16..1", [Text(bar(drift.nmse if drift else 0.0), "blue") for drift in drifts], rank=6, left=True),
        *([noise] if any(ratio is not None for ratio in ratios) else []),
        Column("cosine", [Text(f"{drift.cosine:.6f}" if drift else "-") for drift in drifts], rank=7),
    ]


def bar(nmse: float) -> str:
    """How large an error is on a logarithmic scale from 1e-16 to 1: half a cell for each decade."""
    if nmse <= 0:
        return ""
    decades = round(math.log10(nmse)) + _DECADES if math.isfinite(nmse) else _DECADES
    halves = min(_DECADES, max(0, decades))
    return "━" * (halves // 2) + "╸" * (halves % 2)


def side_columns(lines: Sequence[Line], spelling: Spelling) -> list[Column]:
    """Both sides' statistics of a layer's residual."""

    def pair(name: str, value: Callable[[Stats], float], rank: int, cells: int) -> list[Column]:
        return [
            Column(f"{name} b", [_statistic(line, line.residual.baseline, value, cells) for line in lines], rank),
            Column(f"{name} c", [_statistic(line, line.residual.candidate, value, cells) for line in lines], rank),
        ]

    return [
        *pair("rms", lambda stats: stats.rms, 4, 6),
        *pair("mean", lambda stats: stats.mean, CORE, spelling.mean_cells),
        *pair("min", lambda stats: stats.min, 8, 6),
        *pair("max", lambda stats: stats.max, 8, 6),
    ]


def _statistic(line: Line, stats: Stats | None, value: Callable[[Stats], float], cells: int) -> Text | None:
    if line.opened:
        return None
    if stats is None:
        return Text("-")
    return Text(number(value(stats), cells), "bold red" if stats.nan or stats.inf else "")


def tap_columns(page: Page, lines: Sequence[Line]) -> list[Column]:
    """What only the opened taps have: op, limit and weight."""

    def column(title: str, cell: Callable[[Row], str], rank: int, left: bool = True) -> Column:
        return Column(title, [Text(cell(line.worst)) if line.opened else None for line in lines], rank, left)

    return [
        column("limit", lambda row: tiny(row.local.limit if row.local else None), 1, left=False),
        column("op", lambda row: page.data(row.op, 20), 2),
        column("weight", lambda row: page.data(f"{row.weight} {row.weight_type or ''}") if row.weight else "", 3),
    ]
