"""A run along its tokens: the worst op at each of them, and each slot of the cache with a verdict of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llamadiff.ext.page.closeup import Grid, coarse, grid
from llamadiff.judge.verdict import SEVERITY, WRONG, of_row, of_unjudged, worst_of
from llamadiff.result.rows import Row, stem

# What a slot holds: the cache's own rows where they were recorded, else the rows that are written to it.
_HELD = {"K": ("kv_k", "Kcur_rope", "k_pe", "Kcur_normed", "Kcur_proj"), "V": ("kv_v", "Vcur_proj", "kv_cmpr")}
_STORED = ("kv_k", "kv_v")


@dataclass(frozen=True)
class WorstOp:
    """One token: the tap that is nearest to its limit there, or furthest above it, and its error in that row."""

    tap: str
    error: float
    verdict: str


@dataclass(frozen=True)
class CacheSide:
    """One side of the cache: own errors [layer, slot] as a map, and the slots that are WRONG, (layer, slot) each.

    ``stored``: the cache's rows themselves were recorded, and are held to what was written; else what is written is
    held to what is right. ``word`` is the tap's, without its layer.
    """

    side: str
    word: str
    stored: bool
    verdict: str
    layers: tuple[int, ...]
    errors: Grid
    wrong: tuple[tuple[int, int], ...]


def steps(rows: Sequence[Row], n_tokens: int) -> tuple[WorstOp | None, ...]:
    """The worst op at each token; None where nothing was judged."""
    worst: list[tuple[tuple[int, float], WorstOp] | None] = [None] * n_tokens
    for row in rows:
        errors = row.local.per_token if row.local is not None else ()
        first = n_tokens - len(errors)  # logits may be those of the last token alone
        for token, error in enumerate(errors if first >= 0 else ()):
            verdict = row_verdict(row, error)
            badness = SEVERITY.index(verdict), _over(row, error)
            held = worst[first + token]
            if held is None or badness > held[0]:
                worst[first + token] = badness, WorstOp(row.tap, error, verdict)
    return tuple(found[1] if found is not None else None for found in worst)


def row_verdict(row: Row, error: float) -> str:
    """The verdict on one token's row of a tap, whose NMSE is ``error``."""
    local = row.local
    if local is None:
        return of_unjudged()
    return of_row(row.verdict, error, local.limit, local.hides_row)


def _over(row: Row, error: float) -> float:
    """An error over its limit."""
    limit = row.local.limit if row.local is not None else 0.0
    return 0.0 if not error > 0 else error / limit if limit > 0 else math.inf


def slots(rows: Sequence[Row]) -> tuple[CacheSide, ...]:
    """Both sides of the cache, as far as they were judged."""
    return tuple(found for side in _HELD if (found := _side(side, rows)) is not None)


def _side(side: str, rows: Sequence[Row]) -> CacheSide | None:
    """The cache's rows of one side, of layers that have a row for each token."""
    words = {word: [(row, row.local) for row in rows if stem(row.tap) == word and row.local] for word in _HELD[side]}
    word, held = next(((word, held) for word, held in words.items() if held), ("", []))
    width = max((len(local.per_token) for _, local in held), default=0)
    held = [(row, local) for row, local in held if len(local.per_token) == width]
    if not width:
        return None
    verdicts = [[row_verdict(row, error) for error in local.per_token] for row, local in held]
    layers = tuple(row.layer or 0 for row, _ in held)
    errors = np.asarray([local.per_token for _, local in held], np.float64)
    return CacheSide(
        side=side,
        word=word,
        stored=word in _STORED,
        verdict=worst_of([verdict for own in verdicts for verdict in own]),
        layers=layers,
        errors=grid(coarse(errors), (len(held), width)),
        wrong=tuple((layer, slot) for layer, own in zip(layers, verdicts, strict=True)
                    for slot, verdict in enumerate(own) if verdict == WRONG),
    )  # fmt: skip
