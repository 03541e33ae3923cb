"""Attention's scores read back: which head of K, and which row of it, every score is the product of."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from llamadiff.ext.explain.case import NotRecordedError
from llamadiff.ext.explain.pattern.deviation import SAME, counted, listed, numbered
from llamadiff.ext.explain.read_back.kept import NONE, changed, pages
from llamadiff.ext.explain.read_back.observed import Array, Facts, Observed, Readings, factor_of, first_fit
from llamadiff.judge.fact import Fact

MOST = 512  # tokens: all rows of K are tried for every score


@dataclass(frozen=True)
class Scored:
    """Scores of Q ``q`` [token, head, dim] and K ``k`` [key, kv_head, dim]; head h reads K head ``reads[h]``."""

    o: Observed
    q: Array
    k: Array
    reads: Array
    scale: float

    def compute(self) -> Array:
        """[head, query, key]."""
        return np.asarray(self.scale * np.einsum("thd,shd->hts", self.q, self.k[:, self.reads]))

    def fits(self, scores: Array) -> bool:
        """Whether the recorded scores are these, as far as they are seen."""
        return self.o.fits(np.where(self.seen, scores, 0.0))

    @property
    def seen(self) -> Array:
        """[query, key]."""
        return np.asarray(self.o.case.run.positions[None, :] <= self.o.positions[:, None])


def scores(o: Observed) -> Facts:
    """The heads and the rows of K that were read."""
    s = _parts(o)
    if s is not None:
        yield from first_fit(s.fits, _heads(s), _newest(s), _rows(s), _pages(s), _changed(s))


def _parts(o: Observed) -> Scored | None:
    """What was multiplied; None where the right values are no such products."""
    if o.case.tap.kind.word != "kq" or len(o.input_names()) != 2 or len(o.recorded.shape) != 3:
        return None
    heads, queries, keys = o.recorded.shape
    q = np.asarray(o.values(o.input_names()[0]), np.float64)
    k = _keys(o)
    dim = q.size // (queries * heads)
    if k.size % (keys * dim) or keys > MOST:
        return None
    q, k = q.reshape(queries, heads, dim), k.reshape(keys, -1, dim)
    s = Scored(o, q, k, np.arange(heads) // max(1, heads // k.shape[1]), 1.0)
    ours = np.where(s.seen, s.compute(), 0.0)
    scale = float(factor_of(ours, o.expected))
    return replace(s, scale=scale) if o.is_right(scale * ours) else None


def _keys(o: Observed) -> Array:
    """K's rows: the cache's, or what went into it. Raises NotRecordedError."""
    try:
        return np.asarray(o.case.values(o.input_names()[1])[0], np.float64)
    except NotRecordedError:
        return np.asarray(o.case.values(f"Kcur_rope-{o.case.layer}")[0], np.float64)


def _heads(s: Scored) -> Readings:
    """The K head that every head reads."""
    every = s.scale * np.einsum("thd,skd->hkts", s.q, s.k)
    gaps = (np.square(every - s.o.recorded[:, None]) * s.seen).sum(axis=(2, 3))
    size = (np.square(every) * s.seen).sum(axis=(2, 3))
    own = gaps[np.arange(len(gaps)), s.reads] <= SAME / 100 * size[np.arange(len(gaps)), s.reads]
    reads = np.where(own, s.reads, gaps.argmin(axis=1))
    if (reads != s.reads).any():
        right, was = (", ".join(map(str, some)) for some in (s.reads, reads))
        says = f"heads 0 to {len(reads) - 1} read the K heads {was}, where {right} are right"
        yield replace(s, reads=reads).compute(), Fact("K heads", says, tuple(map(int, reads)))


def _newest(s: Scored) -> Readings:
    """All rows of the cache are what was put into it last: the query's own, where tokens are run one by one."""
    own = s.compute()[:, np.arange(len(s.q)), s.o.rows]
    says = "every score of a query reads K's row of that query's own token"
    yield np.broadcast_to(own[..., None], s.o.recorded.shape), Fact("K newest", says, ())


def _rows(s: Scored) -> Readings:
    """The row of K that the scores of every key read."""
    full, recorded = s.compute(), s.o.recorded
    rows = np.arange(len(s.k))
    for key in range(len(s.k)):
        seen = s.seen[:, key]
        gaps = np.square(recorded[:, seen, key][..., None] - full[:, seen]).sum(axis=(0, 1))
        size = np.square(full[:, seen, key]).sum()
        rows[key] = key if gaps[key] <= SAME / 100 * size else int(gaps.argmin())
        if np.square(recorded[:, seen, key]).sum() <= SAME / 100 * size:
            rows[key] = NONE
    made = np.where(rows == NONE, 0.0, full[:, :, rows])
    zero, moved = np.flatnonzero(rows == NONE), np.flatnonzero((rows != np.arange(len(rows))) & (rows != NONE))
    if not (len(moved) or len(zero)):
        return
    said = [_said(rows, moved)] if len(moved) else []
    if len(zero):
        said.append(f"the scores of {counted('key', zero)} are zero")
    yield made, Fact("K row", "; ".join(said), tuple(int(row) for row in rows))


def _pages(s: Scored) -> Readings:
    """Pages of K in place of others; a row that is not there yet is zero."""
    full, positions = s.compute(), s.o.case.run.positions
    for rows, fact in pages("K", len(s.k), full.size):
        there = (rows != NONE) & (positions[rows] <= s.o.positions[:, None])
        yield np.where(there, full[:, :, rows], 0.0), fact


def _changed(s: Scored) -> Readings:
    """K's rows in another form."""

    def made(rows: Array) -> Array:
        return np.where(s.seen, replace(s, k=rows).compute(), 0.0)

    return ((made(rows), fact) for rows, fact in changed("K", s.k, made, s.o.recorded))


def _said(rows: Array, moved: Array) -> str:
    """Which rows are read in place of which."""
    steps, first = rows[moved] - moved, int(moved[0])
    in_a_row = len(moved) > 1 and (moved == np.arange(first, first + len(moved))).all()
    if in_a_row and (steps == steps[0]).all() and abs(steps[0]) == 1:
        where = "before" if steps[0] < 0 else "after"
        to = "on" if moved[-1] == len(rows) - 1 else f"to {moved[-1]}"
        return f"from key {first} {to} a score reads K's row of the token {where}"
    if len(moved) > 1 and len(set(rows[moved])) == 1:
        return f"in place of K's rows {numbered(moved)} it reads row {rows[first]}"
    if (rows == np.arange(len(rows))[::-1]).all():
        return "K's rows are read in reverse, the last one for the first key"
    named = "rows" if len(moved) > 1 else "row"
    return f"in place of K's {named} {listed(list(moved))} it reads {named} {listed(list(rows[moved]))}"
