"""A map of layers by taps: one cell for each, so that in a deep model a wrong one is seen at once."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from llamadiff.judge.verdict import WRONG, worst_of
from llamadiff.report.terminal.page import MARKS, Page
from llamadiff.report.terminal.tap_lines import is_loud
from llamadiff.result.comparison import Comparison
from llamadiff.result.rows import Row, stem

DEEP = 16  # layers above which there is a map
_MOST = 6  # taps with a line of their own
_LABEL = 24
_TICKS = (5, 10, 20)  # cells from one number to the next


def put_map(page: Page, comparison: Comparison, full: bool) -> None:
    """Print the map of a deep model in some layers of which something is not right; in a full report of any deep one.

    Where every layer is wrong alike, a map would say no more than that.
    """
    rows = [row for row in comparison.rows if row.layer is not None]
    n_layers = 1 + max((row.layer or 0 for row in rows), default=-1)
    loud = {row.layer for row in rows if is_loud(row)}
    if n_layers <= DEEP or not (full or 0 < len(loud) < n_layers):
        return
    told = _pick_taps(rows, full)
    parts = {page.data(word, _LABEL): [row for row in rows if stem(row.tap) == word] for word in told}
    if not told:
        parts["all taps"] = rows
    width = max(len("layer"), *map(len, parts))
    each = -(-n_layers // max(1, page.width - width - 2))  # layers in a cell
    page.put(Text(f"{'layer':{width}}  {_axis(n_layers, each)}"))
    for label, of in parts.items():
        page.put(Text.assemble(f"{label:{width}}  ", _cells(page, of, n_layers, each)))


def _pick_taps(rows: Sequence[Row], full: bool) -> list[str]:
    """The taps that have a line of their own: the wrong ones."""
    stems = list(dict.fromkeys(stem(row.tap) for row in rows if full or row.verdict == WRONG))
    return stems if full else stems[:_MOST]


def _cells(page: Page, rows: Sequence[Row], n_layers: int, each: int) -> Text:
    """The worst verdict of each cell's layers; a blank where nothing was recorded."""
    verdicts: dict[int, list[str]] = {}
    for row in rows:
        verdicts.setdefault((row.layer or 0) // each, []).append(row.verdict)
    cells = Text()
    for cell in range(-(-n_layers // each)):
        worst = worst_of(verdicts[cell]) if cell in verdicts else None
        cells.append(MARKS[worst] if worst else " ", page.emphasis(worst) if worst else "")
    return cells


def _axis(n_layers: int, each: int) -> str:
    """Numbers of layers above their cells, as close as they can be read."""
    room = len(str(n_layers)) + 2
    cells = next(tick for tick in _TICKS if tick >= room)
    return "".join(f"{layer:<{cells}}" for layer in range(0, n_layers, cells * each)).rstrip()
