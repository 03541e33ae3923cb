"""Row lookups read back: which row of the table every token's id got."""

from __future__ import annotations

import numpy as np

from llamadiff.ext.explain.pattern.deviation import listed
from llamadiff.ext.explain.read_back.observed import Array, Facts, Observed, factor_of, only_run
from llamadiff.judge.fact import Fact

MOST = 1 << 28  # values of a table that is looked through
STEP = 4096  # rows that are decoded at once
NEAR = 1e-6  # of a value, that two may differ by and be one
MARKS = 4  # random sums by which a row is known again


def lookup(o: Observed) -> Facts:
    """The row that every wrong token has."""
    case, w = o.case, o.case.engine.w
    if case.weight is None or len(w.shape(case.weight)) != 2 or int(np.prod(w.shape(case.weight))) > MOST:
        return
    ids = np.asarray(case.run.tokens)[o.rows]
    wrong, run = np.flatnonzero(o.is_bad.any(axis=1)), only_run(o.is_bad.any(axis=0))
    if len(ids) != len(o.recorded) or not len(wrong):
        return
    part = slice(None) if run is None else slice(run[0], run[1] + 1)
    scale = _scale(o, w.decode_rows(case.weight, w.read_raw(case.weight, ids)))
    rows = _found(o, o.recorded[wrong, part] / scale, part)
    table = np.asarray(w.decode_rows(case.weight, w.read_raw(case.weight, rows)), np.float64) * scale
    values = o.expected.copy()
    values[wrong, part] = table[:, part]
    if not o.fits(values):
        yield from _from_elsewhere(o, ids, scale)
    elif (rows != ids[wrong]).all():
        found = dict(zip((int(i) for i in ids[wrong]), (int(row) for row in rows), strict=True))
        if all(found[int(i)] == row for i, row in zip(ids[wrong], rows, strict=True)):
            says = listed([f"row {row} for id {i}" for i, row in found.items()])
            where = "" if run is None else f"in channels {run[0]} to {run[1]} "
            yield Fact("rows of ids", f"{where}it looks up {says}", tuple(n for pair in found.items() for n in pair))


def _from_elsewhere(o: Observed, ids: Array, scale: float) -> Facts:
    """Rows that begin at another place in the table: at so many values for each id."""
    w, name = o.case.engine.w, o.case.weight or ""
    flat, width = np.asarray(w.whole(name), np.float64).ravel(), o.recorded.shape[1]
    largest = int(ids.max())
    first = np.flatnonzero(np.abs(flat * scale - o.recorded[int(ids.argmax()), 0]) <= NEAR * np.abs(flat * scale))
    for start in first[first % largest == 0] if largest else ():
        step = int(start) // largest
        places = ids[:, None] * step + np.arange(width)
        if step != width and places.max() < len(flat) and o.fits(flat[places] * scale):
            says = f"the row of id i begins at value {step} * i of the table, where {width} * i is right"
            yield Fact("row places", says, (step,))
            return


def _scale(o: Observed, rows: Array) -> float:
    """What rows are multiplied by, in the right values."""
    return float(factor_of(np.asarray(rows, np.float64).reshape(o.expected.shape), o.expected)) or 1.0


def _found(o: Observed, values: Array, part: slice) -> Array:
    """The rows of the table that are nearest to some values [n, part of embd], by random sums of them."""
    w, name = o.case.engine.w, o.case.weight or ""
    count = w.shape(name)[0]
    towards = np.random.default_rng(0).standard_normal((values.shape[1], MARKS))
    marks = values @ towards
    best, row = np.full(len(values), np.inf), np.zeros(len(values), int)
    for start in range(0, count, STEP):
        numbers = np.arange(start, min(start + STEP, count))
        those = np.asarray(w.decode_rows(name, w.read_raw(name, numbers)), np.float64)[:, part] @ towards
        gaps = np.square(marks[:, None] - those[None]).sum(axis=-1)
        nearest = gaps.argmin(axis=1)
        better = gaps.min(axis=1) < best
        best, row = np.where(better, gaps.min(axis=1), best), np.where(better, numbers[nearest], row)
    return row
