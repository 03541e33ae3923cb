"""The tokens of a run, in a grid: the index of each line's first, ids, texts, and where decoding begins."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from rich.text import Text

from llamadiff.comparison.result import Comparison
from llamadiff.report.terminal.finding import labelled
from llamadiff.report.terminal.page import Page

MANY, HEAD, TAIL = 40, 24, 8


def put_tokens(page: Page, comparison: Comparison) -> None:
    """Print the tokens; of many, the first and the last."""
    tokens, n_prefill = comparison.tokens, comparison.n_prefill
    page.paragraph(labelled("tokens"), Text(_count(len(tokens), n_prefill, comparison.batches)))
    if not tokens:
        return
    split = HEAD if len(tokens) > MANY else len(tokens)
    parts = [range(split), range(len(tokens) - TAIL, len(tokens))] if len(tokens) > MANY else [range(split)]
    digits = max(len(str(token)) for part in parts for token, _ in tokens[part.start : part.stop])
    cells = {number: _cell(page, *tokens[number], digits, number == n_prefill) for part in parts for number in part}
    width = max(cell.cell_len for cell in cells.values())
    for part in parts:
        if part.start:
            page.put(Text(f"       ... {part.start - split} tokens left out ..."))
        _put_grid(page, part, [cells[number] for number in part], width)


def _count(count: int, n_prefill: int, batches: Sequence[int]) -> str:
    parts = sum(end <= n_prefill for end in accumulate(batches))
    how = f"in {parts} batches" if parts > 1 else "in one prefill"
    if not 0 < n_prefill < count:
        return f"{count}, {how}"
    return f"{count}: the first {n_prefill} {how}, decode steps from ▸ on"


def _cell(page: Page, token: int, text: str | None, digits: int, first_decoded: bool) -> Text:
    words = "" if text is None else f":{page.quoted(text)}"
    return Text.assemble("▸" if first_decoded else " ", f"{token:>{digits}}", words)


def _put_grid(page: Page, numbers: range, cells: Sequence[Text], width: int) -> None:
    each = max(1, (page.width - 5) // (width + 2))
    for start in range(0, len(cells), each):
        line = Text(f"{numbers[start]:>5}")
        for cell in cells[start : start + each]:
            padded = cell.copy()
            padded.pad_right(width + 1 - cell.cell_len)
            line = Text.assemble(line, " ", padded)
        page.put(line)
