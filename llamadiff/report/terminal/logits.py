"""The next-token distributions on a page: how far apart they are, and their first tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.text import Text

from llamadiff.report.terminal.columns import Column
from llamadiff.report.terminal.escape import number, tiny
from llamadiff.report.terminal.page import LABEL, STRONG, Page
from llamadiff.report.terminal.tap_columns import names_of
from llamadiff.result.comparison import Comparison
from llamadiff.result.logits import Logits, TopToken

_FEW = 3  # tokens where both sides agree
_GAP = 3


def put_logits(page: Page, comparison: Comparison, full: bool) -> None:
    """Print them; in a full report as a table."""
    logits = comparison.logits
    if logits is None:
        return
    names = names_of(page, comparison)
    page.print_labelled("logits", _head(page, logits, len(comparison.tokens), names))
    tokens = _pick_tokens(logits, full)
    if full:
        page.columns(_columns(page, tokens, names))
    elif tokens:
        cells = [_cell(page, token) for token in tokens]
        indent = LABEL if page.width - LABEL >= max(cell.cell_len for cell in cells) else 0
        page.grid([" " * indent] * len(cells), cells, _GAP)


def _pick_tokens(logits: Logits, full: bool) -> list[TopToken]:
    """The first tokens, few unless the report is a full one, and those that were asked for."""
    top = logits.top if full else logits.top[:_FEW]
    shown = {token.id for token in top}
    return [*top, *(token for token in logits.expected if token.id not in shown)]


def _head(page: Page, logits: Logits, n_tokens: int, names: tuple[str, str]) -> str:
    after = f"after {logits.after} of {n_tokens} tokens: " if 0 < logits.after < n_tokens else ""
    same = {None: "unknown", True: "agrees", False: _disagreement(page, logits, names)}[logits.top1_agree]
    margin = f", margin {number(logits.margin)}" if math.isfinite(logits.margin) else ""
    rows = f"{logits.agreeing}/{logits.rows} rows agree"
    return f"{after}{_divergence(logits, names)}; first token {same}{margin}; {rows}"


def _divergence(logits: Logits, names: tuple[str, str]) -> str:
    """KL, or why there is none."""
    if logits.not_finite:
        sides = " and ".join({"baseline": names[0], "candidate": names[1]}[side] for side in logits.not_finite)
        return f"no KL: the last row of {sides} holds NaN or Inf"
    return f"KL {tiny(logits.kl)} nats" if not logits.partial else "not all were recorded"


def _disagreement(page: Page, logits: Logits, names: tuple[str, str]) -> str:
    sides = [f"{who} {_token(page, top[0])}"
             for who, top in zip(names, (logits.top, logits.candidate_top), strict=True) if top]  # fmt: skip
    return f"DIFFERS ({', '.join(sides)})" if sides else "DIFFERS"


def _token(page: Page, token: TopToken) -> str:
    return f"token {token.id}" if token.text is None else page.quote(token.text, 12)


def _cell(page: Page, token: TopToken) -> Text:
    """``2→4 "ce" 5.2149 / 4.2517``: ranks, text and logits of both sides."""
    unknown, moved = math.isnan(token.candidate), token.rank != token.candidate_rank
    rank = f"{token.rank}→{'-' if unknown else token.candidate_rank}"
    values = f"{number(token.baseline)} / {'-' if unknown else number(token.candidate)}"
    cell = Text.assemble((rank, STRONG if moved else ""), f" {_token(page, token)} {values}")
    cell.truncate(page.width)
    return cell


def _columns(page: Page, top: Sequence[TopToken], names: tuple[str, str]) -> list[Column]:
    moved = [STRONG if token.rank != token.candidate_rank else "" for token in top]
    ranks = ["-" if math.isnan(token.candidate) else str(token.candidate_rank) for token in top]
    return [
        Column("rank", [Text(str(token.rank)) for token in top]),
        Column("id", [Text(str(token.id)) for token in top]),
        Column("text", [Text("" if token.text is None else page.quote(token.text)) for token in top], 2, left=True),
        Column(names[0], [Text(_logit(token.baseline)) for token in top], 1),
        Column(names[1], [Text(_logit(token.candidate)) for token in top], 1),
        Column("rank there", [Text(rank, style) for rank, style in zip(ranks, moved, strict=True)], 1),
    ]


def _logit(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.4f}" if abs(value) < 1e5 else number(value)
