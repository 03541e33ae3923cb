"""Sums read back: the terms at hand that make them, and how often each counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations

import numpy as np

from llamadiff.ext.explain.case import NotRecordedError
from llamadiff.ext.explain.pattern.deviation import factor
from llamadiff.ext.explain.read_back.observed import Array, Facts, Observed, Readings, first_fit, only_run
from llamadiff.judge.fact import Fact

LEAVES = 1e-5  # of an error, that terms may leave whose coefficients are told from the values themselves
ZERO = 1e-4  # a coefficient below which a term is not there
PLAIN = 1e-4  # how near one a coefficient must be to be one
LEAST = 8  # how many values there must be for each term
SHIFTS = {"t-1": -1, "t+1": 1}


def sums(o: Observed) -> Facts:
    """Of which terms a sum is made, everywhere, or in some channels, or from the second token on."""
    terms = dict(_at_hand(o))
    if any(name not in terms for name in o.input_names()):
        return
    bad: Array = o.is_bad.reshape(len(o.recorded), -1)
    run = only_run(bad.any(axis=0))
    first = int(np.argmax(np.append(bad.any(axis=1), True)))
    where = np.ones(bad.shape, bool)
    words, place = "", tuple[int, ...]()
    if run is not None:
        where &= (np.arange(bad.shape[1]) >= run[0]) & (np.arange(bad.shape[1]) <= run[1])
        words, place = f"in channels {run[0]} to {run[1]} ", run
    elif first == 1:
        where &= np.arange(len(bad))[:, None] >= 1
        words, place = "from token 1 on ", (1,)
    yield from first_fit(lambda values: o.fits(values, LEAVES), _made_of(o, terms, where, words, place))


def _at_hand(o: Observed) -> Iterator[tuple[str, Array]]:
    """Values of the tap's shape: what it adds, what came before it, and these a token earlier or later."""
    own = o.input_names()
    before = [tap.name for tap in o.case.run.model.taps if tap.layer in (None, o.case.tap.layer)]
    before = before[: before.index(o.case.tap.name)] if o.case.tap.name in before else before
    for name in dict.fromkeys([*own, *before]):
        try:
            x = np.asarray(o.values(name), np.float64)
        except NotRecordedError:
            continue
        if x.shape != o.recorded.shape:
            continue
        yield name, x
        if name in own and o.part is None:
            n = np.arange(len(x))
            for words, step in SHIFTS.items():
                shifted = x[np.clip(n + step, 0, len(x) - 1)]
                there = (n + step >= 0) & (n + step < len(x))
                yield f"{name}[{words}]", shifted
                yield f"{name}[{words} or 0]", np.where(there.reshape(-1, *[1] * (x.ndim - 1)), shifted, 0.0)


def _made_of(o: Observed, terms: Mapping[str, Array], where: Array, words: str, place: tuple[int, ...]) -> Readings:
    """The fewest terms that make the values that are wrong."""
    names = o.input_names()
    others = [name for name in terms if name not in names]
    tried = [tuple(names), *((*names, other) for other in others)]
    tried += [(*names, *two) for two in combinations(others[:12], 2)]
    flat = where.ravel()
    if flat.sum() < LEAST * 4:
        return
    for some in tried:
        columns = np.stack([terms[name].ravel()[flat] for name in some], axis=1)
        counts, *_ = np.linalg.lstsq(columns, o.recorded.ravel()[flat], rcond=1e-9)
        values = o.expected.ravel().copy()
        values[flat] = columns @ counts
        kept = [(name, float(count)) for name, count in zip(some, counts, strict=True) if abs(count) > ZERO]
        said = " + ".join(_term(name, count) for name, count in kept) or "zero"
        says = f"{words}it is {said}, where {' + '.join(names)} is right"
        yield values, Fact("terms", says, (*place, *(count for _, count in kept)))


def _term(name: str, count: float) -> str:
    return name if abs(count - 1) < PLAIN else f"{factor(count)} {name}"
