"""Comparison -> what the page's script draws from, as plain lists and dictionaries. Every text in it can be seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from llamadiff.ext.page import closeup
from llamadiff.ext.page.pictured import pictured
from llamadiff.ext.page.timeline import CacheSide, slots, steps
from llamadiff.judge.verdict import SEVERITY, WRONG
from llamadiff.numerics.metrics import Stats
from llamadiff.report.json import finite
from llamadiff.report.terminal.escape import escape_line, quote
from llamadiff.report.terminal.tap_lines import first_told, over_limit
from llamadiff.result.comparison import Comparison
from llamadiff.result.logits import Logits, TopToken
from llamadiff.result.rows import Row, kind_of

VERDICTS = SEVERITY
DIGITS = 5  # significant ones of a number
MOST_POSITIONS = 2048
_OWN = 5  # of the candidate's first tokens
CELL = (
    "tap", "column", "layer", "verdict", "op", "weight", "shape", "own", "limit", "times", "arithmetic", "place",
    "expected", "recorded", "drift", "rounding", "cosine", "mean_drift", "rms_ratio", "span", "why",
    *(f"{side}_{name}" for side in ("b", "c") for name in ("rms", "mean", "min", "max", "bad")),
)  # fmt: skip


def data_of(c: Comparison, closeups: int) -> dict[str, Any]:
    """What is drawn, with no more than so many close-ups."""
    labels, places = columns_of(c.rows)
    first = first_told(c)
    leading = c.rows.index(first) if first is not None else None
    drawn = pictured(c.rows, c.diagnosis)
    names = side_names(c)
    data = {
        "names": names,
        "columns": [escape_line(label, 40) for label in labels],
        "fields": CELL,
        "cells": [_cell(row, place) for row, place in zip(c.rows, places, strict=True)],
        "verdicts": VERDICTS,
        "leading": leading,
        "closeups": {str(at): drawn[at].closeup for at in _first(drawn, leading, closeups)},
        "scale": [closeup.LEAST, closeup.MOST],
        "growth": escape_line("; ".join(answer.says for answer in c.normal), 4000) or None,
        "tokens": [quote(text, 16) if text is not None else str(token) for token, text in c.tokens[:MOST_POSITIONS]],
        "prefill": c.n_prefill,
        "steps": [
            step and [escape_line(step.tap, 60), step.error, VERDICTS.index(step.verdict)]
            for step in steps(c.rows, len(c.tokens))[:MOST_POSITIONS]
        ],
        "slots": [_slots(side) for side in slots(c.rows)],
        "logits": _logits(c.logits) if c.logits is not None else None,
    }
    plain: dict[str, Any] = _rounded(finite(data))
    return plain


def side_names(c: Comparison) -> tuple[str, str]:
    """What both sides are called."""
    candidate = "exact arithmetic" if c.is_engine else str(c.candidate.get("name") or "the candidate")
    return escape_line(str(c.baseline.get("name") or "the baseline"), 30), escape_line(candidate, 30)


def _first(rows: Sequence[Row], leading: int | None, count: int) -> list[int]:
    """Which rows' close-ups are shown where not all can be: the leading one's, then WRONG ones'."""
    have = [at for at, row in enumerate(rows) if row.closeup is not None]
    have.sort(key=lambda at: (at != leading, rows[at].verdict != WRONG))
    return have[:count]


def _cell(row: Row, column: int) -> list[Any]:
    local, drift = row.local, row.drift
    place = ", ".join(map(str, local.index)) if local else ""
    values = {
        "tap": escape_line(row.tap, 60), "column": column, "layer": row.layer, "verdict": VERDICTS.index(row.verdict),
        "op": escape_line(row.op, 30), "weight": _weight(row), "shape": " x ".join(map(str, row.shape)),
        "own": local.nmse if local else None, "limit": local.limit if local else None, "times": over_limit(row),
        "arithmetic": local.arithmetic if local else None, "place": place,
        "expected": local.expected if local else None, "recorded": local.recorded if local else None,
        "drift": drift.nmse if drift else None, "rounding": row.ratio_to_noise,
        "cosine": drift.cosine if drift else None, "mean_drift": drift.mean_drift if drift else None,
        "rms_ratio": row.rms_ratio, "span": ", ".join(escape_line(name, 40) for name in row.span[:4]),
        "why": escape_line(row.explained, 300) if row.explained else None,
        **_moments("b", row.baseline), **_moments("c", row.candidate),
    }  # fmt: skip
    return [values[name] for name in CELL]


def _weight(row: Row) -> str | None:
    return escape_line(f"{row.weight} {row.weight_type or ''}".rstrip(), 80) if row.weight else None


def _moments(side: str, stats: Stats | None) -> dict[str, Any]:
    names = ("rms", "mean", "min", "max")
    bad = stats.nan + stats.inf if stats else None
    return {**{f"{side}_{name}": getattr(stats, name) if stats else None for name in names}, f"{side}_bad": bad}


def _slots(side: CacheSide) -> dict[str, Any]:
    """One side of the cache."""
    return {
        "side": side.side, "word": escape_line(side.word, 40), "stored": side.stored, "layers": side.layers,
        "verdict": VERDICTS.index(side.verdict), "errors": side.errors, "wrong": side.wrong[:MOST_POSITIONS],
        "count": len(side.wrong),
    }  # fmt: skip


def _logits(logits: Logits) -> dict[str, Any]:
    first = max(0, logits.after - len(logits.positions))
    return {
        "kl": logits.kl, "agree": logits.top1_agree, "agreeing": logits.agreeing, "rows": logits.rows,
        "partial": logits.partial, "bad": logits.not_finite, "first": first,
        "top": [_top(token) for token in told_tokens(logits)],
        "positions": [
            [each.kl, each.agrees, _token(*each.baseline), _token(*each.candidate)]
            for each in logits.positions[:MOST_POSITIONS]
        ],
    }  # fmt: skip


def _top(token: TopToken) -> list[Any]:
    return [_token(token.id, token.text), token.baseline, token.candidate, token.rank, token.candidate_rank]


def _token(number: int, text: str | None) -> str:
    return quote(text, 20) if text is not None else f"token {number}"


def _rounded(value: Any) -> Any:
    """Numbers with as many digits as a reader can use."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    return value


def columns_of(rows: Sequence[Row]) -> tuple[list[str], list[int]]:
    """The columns' labels, and for each row the number of its column; taps outside the layers have -1."""
    keys = _keys(rows)
    order = _merged([[key for key, row in zip(keys, rows, strict=True) if row.layer == layer]
                     for layer in dict.fromkeys(row.layer for row in rows if row.layer is not None)])  # fmt: skip
    places = {key: number for number, key in enumerate(order)}
    return order, [places[key] if row.layer is not None else -1 for key, row in zip(keys, rows, strict=True)]


def _keys(rows: Sequence[Row]) -> list[str]:
    """What each row is called; a number tells those of one layer apart that are called alike."""
    seen: Counter[tuple[int | None, str]] = Counter()
    keys = []
    for row in rows:
        name = kind_of(row)
        seen[row.layer, name] += 1
        count = seen[row.layer, name]
        keys.append(name if count == 1 else f"{name} {count}")
    return keys


def _merged(sequences: Sequence[Sequence[str]]) -> list[str]:
    """All names, each after the one that it first came after."""
    order: list[str] = []
    for names in sequences:
        at = 0
        for name in names:
            if name in order:
                at = order.index(name) + 1
            else:
                order.insert(at, name)
                at += 1
    return order


def told_tokens(logits: Logits) -> list[TopToken]:
    """The baseline's first tokens, the candidate's first ones that are not among them, and those asked for."""
    told: dict[int, TopToken] = {}
    for token in (*logits.top, *logits.candidate_top[:_OWN], *logits.expected):
        told.setdefault(token.id, token)
    return list(told.values())
