"""Attention's output read back: which head's V every head sums, by which weights, and which rows of V.

What was summed is found in V itself; each finding is computed again in full before it is said.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from llamadiff.ext.explain.alter import moved_on
from llamadiff.ext.explain.case import NotRecordedError
from llamadiff.ext.explain.pattern.deviation import SAME, counted, listed
from llamadiff.ext.explain.read_back.kept import NONE, changed, pages
from llamadiff.ext.explain.read_back.observed import Array, Facts, Observed, Readings, first_fit
from llamadiff.ext.explain.read_back.rope import complex_pairs, real_pairs, turned_by
from llamadiff.judge.fact import Fact
from llamadiff.trace.taps import Tap

BLOCKS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # of keys, that a softmax goes through at a time
APART = 1e-2  # of a row of V, beyond which it is another one
SHIFTS = (1, -1, 2, -2)
FEW = 8  # rows of V that are looked for


@dataclass(frozen=True)
class Mixed:
    """Weights ``p`` [head, query, key] and V ``v`` [key, kv_head, dim]; head h reads V head ``reads[h]``."""

    o: Observed
    p: Array
    v: Array
    reads: Array

    def compute(self) -> Array:
        """[token, head, dim]."""
        return np.asarray(np.einsum("hts,shd->thd", self.p, self.v[:, self.reads]))

    def fits(self) -> bool:
        return self.o.fits(self.compute())

    def fits_but_ends(self, count: int) -> bool:
        """The same but for channels of V that come from beyond its memory."""
        found = self.compute()
        found[..., :count], found[..., -count:] = self.recorded[..., :count], self.recorded[..., -count:]
        return self.o.fits(found)

    @property
    def recorded(self) -> Array:
        """[token, head, dim]."""
        return self.o.recorded.reshape(len(self.o.recorded), len(self.p), -1)


def attention(o: Observed) -> Facts:
    """The heads, the weights and the rows that were summed."""
    m = _parts(o)
    if m is None:
        return
    readings = (_heads, _left_out, _not_rescaled, _turned, _shifted, _rows, _rows_of_heads, _pages, _changed)
    yield from first_fit(lambda fits: bool(fits()), *(each(m) for each in readings))


def _parts(o: Observed) -> Mixed | None:
    """What was mixed; None where the right values are no such mixture."""
    if o.case.tap.kind.word != "kqv_out" or len(o.input_names()) != 2:
        return None
    p = o.input(0, o.shape())
    heads = len(p)
    dim = o.recorded.size // (len(o.recorded) * heads)
    v = rows_of_v(o.case.values, o.case.layer).reshape(len(o.case.run.tokens), -1, dim)
    m = Mixed(o, p, v, np.arange(heads) // max(1, heads // v.shape[1]))
    return m if o.is_right(m.compute()) else None


def rows_of_v(values: Any, layer: int) -> Array:
    """A layer's rows of V."""
    try:
        return np.asarray(values(f"kv_v-{layer}")[0], np.float64)
    except NotRecordedError:
        return np.asarray(values(f"Vcur_proj-{layer}")[0], np.float64)


def _heads(m: Mixed) -> Readings:
    """Every head's place, and the V head that it reads."""
    every = np.einsum("hts,skd->hktd", m.p, m.v)
    heads, kv = every.shape[:2]
    flat, size = every.reshape(heads * kv, -1), np.square(every).sum(axis=(2, 3)).reshape(-1)
    found = []
    for h in range(heads):
        gaps = np.square(flat - m.recorded[:, h].reshape(-1)).sum(axis=1) / np.maximum(size, 1e-300)
        own = h * kv + int(m.reads[h])
        found.append(own if gaps[own] <= gaps.min() + SAME / 100 else int(gaps.argmin()))
    places, reads = np.divmod(np.array(found), kv)
    made = replace(m, p=m.p[places], reads=reads)
    if (places == np.arange(heads)).all():
        right, was = (", ".join(map(str, some)) for some in (m.reads, reads))
        says = f"heads 0 to {heads - 1} read the V heads {was}, where {right} are right"
        yield made.fits, Fact("V heads", says, tuple(map(int, reads)))
    elif (reads == m.reads[places]).all():
        moved = [f"place {h} holds head {places[h]}" for h in range(heads) if places[h] != h]
        says = f"its heads are in another order: {listed(moved)}"
        yield made.fits, Fact("head places", says, tuple(map(int, places)))


def _turned(m: Mixed) -> Readings:
    """V as K is: its rows rotated by their positions, every pair as RoPE turned K's."""
    values, layer = m.o.case.values, m.o.case.layer
    try:
        after = np.asarray(values(f"Kcur_rope-{layer}")[0], np.float64)
        before = np.asarray(values(m.o.case.run.model.inputs(_tap(m, f"Kcur_rope-{layer}"))[0])[0], np.float64)
    except (NotRecordedError, IndexError):
        return
    if after.size != m.v.size or before.size != after.size:
        return
    for in_pairs in (True, False):
        k, turned, v = (complex_pairs(x.reshape(m.v.shape), m.v.shape[-1], in_pairs) for x in (before, after, m.v))
        table = turned_by(k, turned)
        says = "the rows of V that it reads are rotated by their positions, as K's are"
        yield replace(m, v=real_pairs(v * table[:, None], in_pairs)).fits, Fact("V turned", says, ())


def _tap(m: Mixed, name: str) -> Tap:
    return next(tap for tap in m.o.case.run.model.taps if tap.name == name)


def _shifted(m: Mixed) -> Readings:
    """V read from a place in memory that is some values on or back: one row's last are the next one's first."""
    flat = m.v.reshape(-1)
    for by in SHIFTS:
        s = "s" if abs(by) > 1 else ""
        says = f"V is read from {abs(by)} value{s} {'further on' if by > 0 else 'before'} in memory"
        made = replace(m, v=np.roll(flat, -by).reshape(m.v.shape))
        yield partial(made.fits_but_ends, abs(by)), Fact("V shifted", says, (by,))


def _left_out(m: Mixed) -> Readings:
    """Keys whose values are not added."""
    for words, lost in _keys(m):
        several = (m.p > 0).sum(axis=-1, keepdims=True) > 1
        for part, what in ((lost, ""), (lost & several, ", where there is another key")):
            says = f"the value of {words} is not added{what}"
            yield replace(m, p=np.where(part, 0.0, m.p)).fits, Fact("value lacks", says, (words,))


def _keys(m: Mixed) -> Iterator[tuple[str, Array]]:
    """Keys that may be left out, by query."""
    key = np.arange(m.p.shape[-1])
    yield "each query's own key", np.broadcast_to(m.o.rows[:, None] == key[None, :], m.p.shape)
    yield "the first key", np.broadcast_to(key == 0, m.p.shape)
    yield "the key of the largest weight", key == m.p.argmax(axis=-1)[..., None]
    for k in key[1 : FEW + 1]:
        yield f"key {k}", np.broadcast_to(key == k, m.p.shape)


def _not_rescaled(m: Mixed) -> Readings:
    """Weights as a softmax leaves them that goes block by block, and does not scale down what it has."""
    keys = m.p.shape[-1]
    with np.errstate(divide="ignore"):
        logs = np.log(m.p)  # scaled scores, but for a constant in each row
    for block in (size for size in BLOCKS if size < keys):
        ends = np.minimum(np.arange(keys) // block * block + block - 1, keys - 1)
        most = np.maximum.accumulate(logs, axis=-1)[..., ends]
        kept = np.where(m.p > 0, np.exp(logs - np.where(np.isfinite(most), most, 0.0)), 0.0)
        right = np.exp(logs - logs.max(axis=-1, keepdims=True))
        for total, what in ((right, ""), (kept, ", and nor is its sum")):
            says = "what was summed is not rescaled where the largest score grows, "
            says += f"from one block of {block} key{'s' if block > 1 else ''} to the next{what}"
            yield replace(m, p=kept / total.sum(axis=-1, keepdims=True)).fits, Fact("not rescaled", says, (block,))


def _rows(m: Mixed) -> Readings:
    """Rows of V that are others: those of other tokens, of another layer, or zero."""
    other = _solved(m)
    size = float(np.sqrt(np.mean(np.square(m.v)))) or 1.0
    away = np.sqrt(np.square(other - m.v).mean(axis=(1, 2))) > APART * size
    rows = np.flatnonzero(away)
    if not 0 < len(rows) <= max(FEW, len(m.v) // 2):
        return
    for layer in range(m.o.case.run.model.n_layer):
        same = layer == m.o.case.layer
        v = m.v if same else _of_layer(m, layer)
        if v is None:
            continue
        gaps = np.square(other[rows][:, None] - v[None]).mean(axis=(2, 3))
        near = gaps.argmin(axis=1)
        if same:
            s = "s" if len(rows) > 1 else ""
            was, instead = (", ".join(map(str, some)) for some in (rows, near))
            says = f"in place of V's row{s} {was} it reads row{s} {instead}"
            yield _with_rows(m, rows, v[near]).fits, Fact("V row", says, (*map(int, rows), *map(int, near)))
        elif (near == rows).all():
            says = f"in place of V's {counted('row', rows)} it reads layer {layer}'s"
            yield _with_rows(m, rows, v[near]).fits, Fact("V layer", says, (layer, *map(int, rows)))
    says = f"it reads zeros for V's {counted('row', rows)}"
    yield _with_rows(m, rows, np.zeros_like(m.v[rows])).fits, Fact("V zero", says, tuple(map(int, rows)))


def _rows_of_heads(m: Mixed) -> Readings:
    """Heads of V whose rows are read from some rows before or after; beyond the ends they are zero."""
    other, count = _solved(m), len(m.v)
    v, steps = m.v.copy(), dict[int, int]()
    for kv in range(m.v.shape[1]):
        gaps = [np.square(other[:, kv] - moved_on(m.v[:, kv], -step, 0)).sum() for step in range(1 - count, count)]
        steps[kv] = int(np.argmin(gaps)) + 1 - count
        v[:, kv] = moved_on(m.v[:, kv], -steps[kv], 0)
    moved = {kv: step for kv, step in steps.items() if step}
    if moved:
        said = [f"{abs(step)} row{'s' if abs(step) > 1 else ''} {'before' if step < 0 else 'after'} in V's head {kv}"
                for kv, step in moved.items()]  # fmt: skip
        says = f"rows of V are read from {listed(said)}, zeros where there are none"
        values = tuple(number for pair in moved.items() for number in pair)
        yield replace(m, v=v).fits, Fact("V rows of heads", says, values)


def _pages(m: Mixed) -> Readings:
    """Pages of V in place of others; a row that is not there yet is zero."""
    for rows, fact in pages("V", len(m.v), m.p.size):
        there = (rows != NONE) & (rows <= m.o.rows[:, None])
        yield replace(m, p=np.where(there, m.p, 0.0), v=m.v[rows]).fits, fact


def _changed(m: Mixed) -> Readings:
    """V's rows in another form."""

    def made(rows: Array) -> Array:
        return replace(m, v=rows).compute()

    return ((replace(m, v=rows).fits, fact) for rows, fact in changed("V", m.v, made, m.recorded))


def _solved(m: Mixed) -> Array:
    """The rows of V [key, kv_head, dim] that come nearest to what was summed."""
    out = m.v.copy()
    for kv in range(m.v.shape[1]):
        heads = np.flatnonzero(m.reads == kv)
        weights = m.p[heads].reshape(-1, m.p.shape[-1])
        gap = (m.recorded - m.compute())[:, heads].swapaxes(0, 1).reshape(len(weights), -1)
        out[:, kv] += np.linalg.lstsq(weights, gap, rcond=1e-6)[0]
    return out


def _with_rows(m: Mixed, rows: Array, values: Array) -> Mixed:
    v = m.v.copy()
    v[rows] = values
    return replace(m, v=v)


def _of_layer(m: Mixed, layer: int) -> Array | None:
    """Another layer's rows of V, where they were recorded and are alike in shape."""
    try:
        v = rows_of_v(m.o.case.values, layer)
    except NotRecordedError:
        return None
    return v.reshape(m.v.shape) if v.size == m.v.size else None
