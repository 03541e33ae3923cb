"""Which taps a page shows close up: those around each divergence, and the worst of each kind."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from llamadiff.judge.verdict import SEVERITY, UNCHECKED, WRONG
from llamadiff.result.diagnosis import Diagnosis
from llamadiff.result.rows import Row, kind_of

AROUND = 5  # taps before and after a divergence
MOST = 72


def pictured(rows: Sequence[Row], diagnosis: Sequence[Diagnosis]) -> tuple[Row, ...]:
    """The rows, with the close-ups that are worth their room."""
    if not any(row.closeup for row in rows):
        return tuple(rows)
    chosen = set(list(dict.fromkeys(_wanted(rows, diagnosis)))[:MOST])
    return tuple(row if at in chosen else replace(row, closeup=None) for at, row in enumerate(rows))


def _wanted(rows: Sequence[Row], diagnosis: Sequence[Diagnosis]) -> Iterator[int]:
    """Places of rows, those to be kept first."""
    wrong = [at for at, row in enumerate(rows) if row.verdict == WRONG]
    wrong = wrong or [at for at, row in enumerate(rows) if row.verdict == UNCHECKED][:1]
    named = {d.tap for d in diagnosis}
    firsts = list({kind_of(rows[at]): at for at in reversed(wrong)}.values())
    divergences = sorted({*firsts, *(at for at in wrong if rows[at].tap in named)})
    yield from divergences
    yield from wrong[:AROUND]
    worst: dict[str, int] = {}
    for at, row in enumerate(rows):
        kind = kind_of(row)
        if row.closeup and (kind not in worst or _badness(row) > _badness(rows[worst[kind]])):
            worst[kind] = at
    yield from worst.values()
    for at in divergences:
        yield from range(max(0, at - AROUND), min(len(rows), at + AROUND + 1))


def _badness(row: Row) -> tuple[int, float]:
    error = row.local.nmse if row.local is not None else row.drift.nmse if row.drift is not None else 0.0
    return SEVERITY.index(row.verdict), 0.0 if math.isnan(error) else error
