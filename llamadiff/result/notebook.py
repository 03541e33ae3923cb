"""A comparison in a notebook: the finding, and the taps that are not right, as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from llamadiff.judge.verdict import MATCH, NOISE, UNCHECKED, WRONG
from llamadiff.result.message import Message
from llamadiff.result.rows import Row

MOST = 20  # taps
_TITLES = ("tap", "verdict", "own error", "limit")
# As in a terminal: a verdict has a background of its own.
_BADGES = {
    MATCH: "color:#ffffff;background:#008700",
    NOISE: "color:#ffffff;background:#005f87",
    WRONG: "color:#ffffff;background:#d70000",
    UNCHECKED: "color:#000000;background:#ffd700",
}


def as_html(verdict: str, said: Message, rows: Sequence[Row]) -> str:
    """The finding and the taps that are not right as a piece of HTML; ``frame()`` has every tap."""
    badge = f'<b style="{_BADGES[verdict]};padding:0 0.5em">{verdict.upper()}</b>'
    head = f"<p>{badge} <b>{escape(said.headline)}</b><br>{escape('; '.join(said.clauses))}</p>"
    told = [row for row in rows if row.verdict in (WRONG, UNCHECKED)]
    return head + (_table(told) if told else "")


def _table(rows: Sequence[Row]) -> str:
    cells = [_cells(row) for row in rows[:MOST]]
    more = f"<p>{len(rows) - MOST} more taps: see frame()</p>" if len(rows) > MOST else ""
    return f"<table>{_line('th', _TITLES)}{''.join(_line('td', each) for each in cells)}</table>{more}"


def _cells(row: Row) -> tuple[str, ...]:
    local = row.local
    sizes = (f"{local.nmse:.1e}", f"{local.limit:.0e}") if local is not None else ("", "")
    return row.tap, row.verdict.upper(), *sizes


def _line(tag: str, cells: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"
