"""RoPE read back: the angle and the length that every pair was turned by, at every position.

A pair of values is a complex number; over all heads, least squares give the factor between before and after. From the
table of its angles follow positions or frequencies, whichever of them explains it alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from llamadiff.ext.explain.pattern.deviation import counted, factor, listed
from llamadiff.ext.explain.pattern.turned import law
from llamadiff.ext.explain.read_back.observed import IN_16_BITS, LEFT, Array, Facts, Observed, sole, strictly
from llamadiff.ext.file.orders import order_in_words
from llamadiff.judge.fact import Fact, runs_of

UNMOVED = 1e-6  # of the largest value, by which values may differ that are not turned
WHOLE = 0.02  # how near a whole number a position must be to be taken for it
SLOW = 1e-2  # radians a position: what turns less is read less surely
ALIKE = 1e-3  # of a length or a frequency, that two may differ by and be one
STEPS = tuple(2.0**-n for n in range(2, 13))  # radians, that angles may be multiples of


@dataclass(frozen=True)
class Turned:
    """Some heads before and after: ``x``, ``y`` and ``right`` [token, head, pair], complex."""

    o: Observed
    x: Array
    y: Array
    right: Array
    heads: Array  # which heads these are
    may_leave: float = LEFT

    @cached_property
    def table(self) -> Array:
        """The factor of every token and pair: [token, pair]."""
        return turned_by(self.x, self.y)

    @cached_property
    def right_table(self) -> Array:
        return turned_by(self.x, self.right)

    @property
    def positions(self) -> Array:
        return np.asarray(self.o.positions, np.float64)

    @cached_property
    def frequencies(self) -> Array:
        """The right ones, radians a position: [pair]."""
        return _frequencies(self.right_table, self.positions)

    def fits(self, table: Array) -> bool:
        """Whether these heads were turned by such a table: of their error next to nothing is left."""
        return self.fits_values(self.x * table[:, None])

    def fits_values(self, y: Array) -> bool:
        return self.left(y) <= self.may_leave

    def left(self, y: Array) -> float:
        """What of the error is left if these are the heads."""
        rest, error = np.abs(self.y - y) ** 2, np.abs(self.y - self.right) ** 2
        return float(rest.sum() / error.sum()) if rest.max() <= error.mean() / 2 else 1.0

    def of_heads(self, heads: Array) -> Turned:
        """Some of the heads."""
        x, y, right = (side[:, heads] for side in (self.x, self.y, self.right))
        return Turned(self.o, x, y, right, self.heads[heads])


def rope(o: Observed) -> Facts:
    """By what the pairs were turned."""
    found = _turned(o)
    if found is None:
        return
    wrong = np.array([np.abs(found.y - found.right)[:, h].max() > 1e-4 for h in found.heads])
    for some in (found, *([found.of_heads(np.flatnonzero(wrong))] if wrong.any() and not wrong.all() else ())):
        left = some.left(some.x * some.table[:, None])
        strict = replace(some, may_leave=strictly(left))
        facts = [*_in_place(some), *(_lengths(strict) if left <= LEFT else ()), *_angles(strict)]
        if facts:
            yield from facts
            return


def turned_by(x: Array, y: Array) -> Array:
    """By what x [token, head, pair] comes nearest to y, over the heads."""
    return np.asarray((y * x.conj()).sum(axis=1) / np.maximum((np.abs(x) ** 2).sum(axis=1), 1e-300))


def _turned(o: Observed) -> Turned | None:
    """The pairs of all heads, in the layout in which the right values are turned; None if they are in none."""
    if o.recorded.ndim != 3:
        return None
    sides, size = (o.input(), o.recorded, o.expected), _rotated(o)
    for in_pairs in (True, False):
        x, y, right = (complex_pairs(side, size, in_pairs) for side in sides)
        found = Turned(o, x, y, right, np.arange(o.recorded.shape[1]))
        left = np.abs(found.right - found.x * found.right_table[:, None]) ** 2
        if left.sum() <= 1e-9 * (np.abs(found.right) ** 2).sum():
            return found
    return None


def _rotated(o: Observed) -> int:
    """How many values of each head the right op turns: all up to the last one that changes."""
    moved = np.abs(o.expected - o.input()).max(axis=(0, 1))
    last = np.flatnonzero(moved > UNMOVED * np.abs(o.expected).max())
    return 2 * ((int(last[-1]) + 2) // 2) if len(last) else o.recorded.shape[-1]


def real_pairs(z: Array, in_pairs: bool) -> Array:
    """Complex pairs as values: the other way round."""
    parts = np.stack([z.real, z.imag], axis=-1 if in_pairs else -2)
    return parts.reshape(*z.shape[:-1], -1)


def complex_pairs(x: Array, n_rot: int, in_pairs: bool) -> Array:
    """The pairs of each head [..., dim] that are turned, as complex numbers."""
    half = n_rot // 2
    if in_pairs:
        return np.asarray(x[..., 0:n_rot:2] + 1j * x[..., 1:n_rot:2])
    return np.asarray(x[..., :half] + 1j * x[..., half:n_rot])


def _frequencies(table: Array, positions: Array) -> Array:
    """Each pair's turn from one position to the next, told ever more finely by tokens further apart: [pair]."""
    order = np.argsort(positions, kind="stable")
    table, positions = table[order], positions[order]
    turn, lag = np.zeros(table.shape[1]), 1
    while lag < 2 * (positions[-1] - positions[0]):
        other = np.searchsorted(positions, positions + lag, side="right") - 1
        near = np.flatnonzero(2 * (positions[other] - positions) > lag)
        step, product = (positions[other] - positions)[near, None], table[other[near]] * table[near].conj()
        if len(near):
            weight = step * np.abs(product)
            further = np.angle(product * np.exp(-1j * turn * step))
            turn = turn + (weight * further).sum(axis=0) / np.maximum((weight * step).sum(axis=0), 1e-300)
        lag *= 2
    return turn


def _in_place(t: Turned) -> Facts:
    """One value of each pair made of the other one's new value."""
    c, s = t.right_table.real[:, None], t.right_table.imag[:, None]
    a, b, first, second = t.x.real, t.x.imag, t.right.real, t.right.imag
    for which, y in (("second", first + 1j * (b * c + first * s)), ("first", (a * c - second * s) + 1j * second)):
        if t.fits_values(y):
            says = f"the {which} value of each pair is made of the other one's new value{_whose(t)}"
            yield Fact("in place", says, (which,))


def _whose(t: Turned) -> str:
    """Which heads, where not all."""
    if len(t.heads) == t.o.recorded.shape[1]:
        return ""
    return f", in {counted('head', t.heads)}"


def _lengths(t: Turned) -> Facts:
    """Pairs that come out longer or shorter, by one factor at every position."""
    factors = np.abs(t.table) / np.abs(t.right_table)
    middle = np.median(factors, axis=0)
    if np.abs(factors - middle).max() > ALIKE:
        return
    for pairs, value in _stretches(middle):
        which = "all pairs" if len(pairs) == len(middle) else _named(pairs)
        come = "comes" if len(pairs) == 1 else "come"
        says = f"{which} {come} out {factor(value)} times as long as {_they(pairs)} should{_whose(t)}"
        yield Fact("pair lengths", says, (int(pairs[0]), int(pairs[-1]), value))


def _stretches(factor: Array) -> Iterator[tuple[list[int], float]]:
    """Runs of pairs with one factor that is not 1; none if there are many."""
    rest = [int(i) for i in np.flatnonzero(np.abs(factor - 1) > ALIKE)]
    runs = runs_of(rest)
    values = [sole(factor[run], ALIKE) for run in runs]
    if len(runs) <= 2 and None not in values:
        yield from ((run, value) for run, value in zip(runs, values, strict=True) if value is not None)


def _named(pairs: Sequence[int]) -> str:
    return f"pairs {pairs[0]} to {pairs[-1]}" if len(pairs) > 1 else f"pair {pairs[0]}"


def _they(pairs: Sequence[int]) -> str:
    return "they" if len(pairs) > 1 else "it"


def _angles(t: Turned) -> Facts:
    """What explains the angles: the tokens' positions, or the pairs' frequencies."""
    length = np.abs(t.table)
    if (length < UNMOVED * length.max()).any():  # what is zero has no angle
        return
    turns = t.table / np.maximum(length, 1e-300)
    if np.abs(turns - t.right_table / np.abs(t.right_table)).max() < 1e-5:
        return
    positions = _positions(turns, t.frequencies)
    if t.fits(length * np.exp(1j * positions[:, None] * t.frequencies)):
        yield from _told_positions(t, positions)
        return
    theta = t.positions[:, None] * t.frequencies
    for name, rounded in IN_16_BITS.items():
        if t.fits(length * np.exp(1j * rounded(theta))):
            yield Fact("rounded angles", f"its angles are rounded to {name}{_whose(t)}", (name,))
            return
    for step in STEPS:
        if t.fits(length * np.exp(1j * np.rint(theta / step) * step)):
            says = f"its angles are rounded to multiples of 1/{round(1 / step)}{_whose(t)}"
            yield Fact("stepped angles", says, (step,))
            return
    frequencies = _frequencies(turns, t.positions)
    if len(turns) > 2 and t.fits(length * np.exp(1j * t.positions[:, None] * frequencies)):
        yield from _told_frequencies(t, frequencies, length)


def _positions(turns: Array, frequencies: Array) -> Array:
    """The position of each token, from the slowest pair to the fastest; whole where it is nearly so."""
    positions = np.zeros(len(turns))
    for pair in np.argsort(np.abs(frequencies)):
        if frequencies[pair]:
            positions += np.angle(turns[:, pair] * np.exp(-1j * positions * frequencies[pair])) / frequencies[pair]
    whole = np.rint(positions)
    return whole if np.abs(positions - whole).max() < WHOLE else positions


def _told_positions(t: Turned, positions: Array) -> Facts:
    there = t.positions != 0
    times = sole(positions[there] / t.positions[there], ALIKE) if there.any() else None
    heads = f" of {counted('head', t.heads)}" if _whose(t) else ""
    if times is not None and abs(positions[~there]).max(initial=0.0) < WHOLE:
        says = f"the rows{heads} are rotated by their positions times {factor(times)}"
        if abs(times) < ALIKE:
            says = f"the rows{heads} are not rotated"
        yield Fact("times position", says, (times, *map(int, t.heads)))
    else:
        whole = [int(p) if p == int(p) else float(f"{p:.4g}") for p in np.round(positions, 3)]
        has_gaps = (np.diff(t.positions) > 1).any() and not heads and all(isinstance(p, int) for p in whole)
        by_law = law(np.array(whole), np.array(t.positions, int)) if has_gaps else None
        says = by_law or f"the rows{heads} are rotated by the positions {_in_runs(whole)}"
        yield Fact("positions", says, tuple(whole))


def _in_runs(positions: Sequence[float]) -> str:
    """``0 to 7, then 0 to 3, then 4 times 7``."""
    runs: list[list[float]] = []
    for position in positions:
        own = runs[-1] if runs else []
        step = position - own[-1] if own else None
        steps = {b - a for a, b in pairwise(own)}
        if own and step in (0, 1) and steps <= {step}:
            own.append(position)
        else:
            runs.append([position])
    return ", then ".join(map(_run, runs))


def _run(run: Sequence[float]) -> str:
    if len(run) == 1:
        return str(run[0])
    return f"{len(run)} times {run[0]}" if run[0] == run[-1] else f"{run[0]} to {run[-1]}"


def _base(frequencies: Array) -> float | None:
    """The base whose powers frequencies are, if they are; told by all but the slowest, which say little."""
    if not (frequencies > 0).all():
        return None
    pair = np.arange(len(frequencies)) * (frequencies > SLOW)
    base = float(np.exp(-(pair * np.log(frequencies)).sum() / np.square(pair).sum() * len(frequencies)))
    near = np.abs(_powers(base, len(frequencies)) / frequencies - 1)[frequencies > SLOW]
    return base if near.max() < ALIKE else None


def _powers(base: float, pairs: int) -> Array:
    return np.asarray(base ** (-np.arange(pairs) / pairs))


def _told_frequencies(t: Turned, found: Array, length: Array) -> Facts:
    """Frequencies that are others': rounded, of other pairs, or multiplied in some pairs."""
    right, positions = t.frequencies, t.positions[:, None]

    def fits(frequencies: Array) -> bool:
        return t.fits(length * np.exp(1j * positions * frequencies))

    for name, rounded in IN_16_BITS.items():
        if fits(rounded(right)):
            yield Fact("rounded frequencies", f"its frequencies are rounded to {name}{_whose(t)}", (name,))
            return
    near = np.abs(found[:, None] - right[None, :]).argmin(axis=1)
    if len(set(near)) == len(near) and fits(right[near]):
        says = f"by their frequencies {order_in_words(near, 'pair')}{_whose(t)}"
        yield Fact("frequency order", says, tuple(int(i) for i in near))
        return
    base, was = _base(found), _base(right)
    if base is not None and fits(_powers(base, len(found))):
        where = f", where {was:.6g} is right" if was is not None else ""
        yield Fact("base", f"its frequencies are those of base {base:.6g}{where}{_whose(t)}", (base,))
        return
    told = list(_stretches(found / right))
    exact = right.copy()
    for pairs, value in told:
        exact[pairs] *= value
    if told and fits(exact):
        for pairs, value in told:
            many = f"the frequenc{'ies' if len(pairs) > 1 else 'y'} of {_named(pairs)}"
            which = "all frequencies" if len(pairs) == len(right) else many
            are = "are" if len(pairs) > 1 else "is"
            says = f"{which} {are} {factor(value)} times what {_they(pairs)} should be{_whose(t)}"
            yield Fact("frequencies", says, (pairs[0], pairs[-1], value))
        return
    pairs = [int(i) for i in np.flatnonzero(np.abs(found / right - 1) > ALIKE)]
    if pairs:
        some = listed([f"pair {i} by {found[i]:.4g}, where {right[i]:.4g} is right" for i in pairs])
        yield Fact("other frequencies", f"a position turns {some}{_whose(t)}", tuple(float(found[i]) for i in pairs))
