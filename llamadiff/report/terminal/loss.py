"""What quantization costs on a page: the tensors that cost most; in a full report layers and statistics too."""

from __future__ import annotations

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
from llamadiff.report.terminal.page import Page


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
