"""Norms read back: y = f(row) * x * w(channel), as one factor for each row and one for each channel.

The same is read from the right values; what differs is said.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from llamadiff.diagnose.read_back.norm_size import Normed, divided, normed
from llamadiff.diagnose.read_back.observed import (
    LEFT,
    Array,
    Facts,
    Observed,
    Readings,
    factor_of,
    first_fit,
    sole,
    strictly,
)
from llamadiff.judge.pattern.deviation import Fact, counted, numbered
from llamadiff.numerics.orders import order_in_words

STRICT = 1e-5  # of an error, that a weight may leave that is told from the values themselves
CLOSE = 1e-4  # of a weight's size, that two may differ by and be one


def norm(o: Observed) -> Facts:
    """What a norm divided by, and what it multiplied by."""
    n = normed(o)
    if n is None:
        return
    factors = n.factors(n.y)
    left = n.left(factors[:, None] * n.x * n.w)
    if (factors > 0).all() and left <= LEFT:
        yield from divided(replace(n, may_leave=strictly(left)), factors)
        return
    right = n.factors(n.right)[:, None] * n.x
    weight = factor_of(right, n.y, axis=0)
    left, facts = n.left(right * weight) if len(n.x) > 1 else 1.0, tuple[Fact, ...]()
    if left <= LEFT:
        strict = replace(n, may_leave=strictly(left))
        facts = tuple(first_fit(lambda w: strict.fits(right * w), _weighed(strict, weight)))
    facts = facts or tuple(first_fit(n.fits, _twice(n))) or tuple(_left_out(n))
    yield from facts or (_weighed_otherwise(n, weight) if left <= STRICT else ())


def _weighed(n: Normed, weight: Array) -> Readings:
    """Every channel has one factor: what the weight was."""
    w, size = n.w, float(np.sqrt(np.mean(n.w**2)))
    for name, other in _others(n):
        yield other, Fact("weight of", f"its weight is {name}", (name,))
    added = sole(weight - w, CLOSE * size)
    if added is not None:
        yield w + added, Fact("weight plus", f"its weight is the file's plus {added:.4g}", (added,))
    other = np.abs(weight - w) > 1e-3 * size
    if not other.any():
        return
    first, last = (int(np.flatnonzero(other)[end]) for end in (0, -1))
    part = (np.arange(len(w)) >= first) & (np.arange(len(w)) <= last)
    for value in () if part.all() else (1.0, 0.0):
        says = f"its weight is {value:g} in channels {first} to {last}"
        yield np.where(part, value, w), Fact("weight part", says, (value, first, last))
    order = np.abs(weight[:, None] - w[None, :]).argmin(axis=1)
    if len(set(order)) == len(order):
        says = f"its weight is in another order: {order_in_words(order, 'channel')}"
        yield w[order], Fact("weight order", says, tuple(int(i) for i in order))
    if (w > 0).all() and (weight > 0).all():
        logs = np.log(w)
        power = float((logs * np.log(weight)).sum() / np.square(logs).sum())
        yield w**power, Fact("weight power", f"its weight is the file's to the power {power:.4g}", (power,))


def _others(n: Normed) -> Iterator[tuple[str, Array]]:
    """No weight at all, or another of the file's."""
    yield "left out", np.ones_like(n.w)
    case = n.o.case
    for name in case.run.model.tensors:
        other = case.vector(name) if case.engine.w.shape(name) == n.w.shape else None
        if other is not None:
            yield name, np.asarray(other, np.float64)


def _weighed_otherwise(n: Normed, weight: Array) -> Facts:
    """Another weight, whatever it is."""
    other = np.flatnonzero(np.abs(weight - n.w) > 1e-3 * np.sqrt(np.mean(n.w**2)))
    where = f" in channels {numbered([int(i) for i in other])}" if 0 < len(other) < len(n.w) else ""
    says = f"its weight is another than the file's{where}, the same for every token"
    yield Fact("weight other", says, tuple(int(i) for i in other))


def _left_out(n: Normed) -> Facts:
    """Tokens whose input goes on as it is."""
    o = n.o
    bad = o.is_bad.reshape(len(o.recorded), -1).any(axis=1)
    wrong = bad.reshape(-1, *[1] * (o.recorded.ndim - 1))
    if o.fits(np.where(wrong, o.input(), o.expected)):
        tokens = [int(t) for t in np.flatnonzero(bad)]
        where = f" in {counted('token', tokens)}" if not bad.all() else ""
        yield Fact("left out", f"it is left out{where}: its input goes on", tuple(tokens))


def _twice(n: Normed) -> Readings:
    """A norm of what is normed already; a norm of what is weighed already."""

    def again(x: Array) -> Array:
        return np.asarray(x / np.sqrt(np.square(x).mean(axis=1, keepdims=True) + n.epsilon))

    yield again(again(n.x) * n.w + n.b) * n.w, Fact("twice", "it is applied twice, weight and all", (2,))
    yield again(n.x * n.w), Fact("weight first", "its rows are multiplied by the weight first, and normalised then")
