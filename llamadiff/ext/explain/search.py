"""The search: which known bugs, replayed, give what the candidate recorded."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product, takewhile, tee

import numpy as np

from llamadiff.ext.explain.budget import CONFIRMING, CONFIRMING_SECONDS, Budget
from llamadiff.ext.explain.case import Case, NotRecordedError
from llamadiff.ext.explain.part import Part
from llamadiff.ext.explain.registry import Bug, Change, Changes, changes_of, known_bugs
from llamadiff.ext.explain.solve import PROBE, lowest
from llamadiff.ext.explain.subgraph import Subgraph, subgraph_of
from llamadiff.ext.explain.together import errors
from llamadiff.ext.graph.engine import Alter
from llamadiff.judge.fit import PARTLY
from llamadiff.numerics.policies import COARSE, F32
from llamadiff.numerics.rounding_tap import Carrier

EXPLAINS = 0.01  # what a fit may leave of the right op's error
VARIES = 0.05  # the same of a way of rounding: a value on the edge between two steps may go either way
MOST = 0.5  # the same, where noise is as large: in 16 bits many values are on edges
OTHER_SUMS = 3e-6  # of a result, root mean square: what sums in another order make of it
FURTHER = 4.0  # times as far as arithmetics lie apart at the right op they may lie with a bug
SEPARATES = 0.1  # of the right op's error: limits beyond it tell nothing apart
DROPS, AS_GOOD, CLEARLY = 0.1, 1.1, 3.0  # of the right op's error; times the best fit's are its equals, and others'
PAIRS = 1e10  # multiply-adds for two bugs at once
FEW_BEST = 3  # bugs that nothing tells apart
ALONG = 0.25  # of the right op's error: what its direction does not explain
SMALL = 0.05  # of the model's constant: a smaller one may be any
NEARER, REFINED = 0.9, 6  # of the right op's error; how many constants of a span are solved for
EXACT, SLOWEST = 1e-11, "misread"  # where a fit leaves no more, the bugs of the slowest family are no longer asked
AT_ONCE, WIDE, ALIKE = 3, 4, 2  # bugs of one span beside those proved elsewhere; how many follow a set, of one bug
SAME = 1 + 1e-6  # times what a bug leaves another one leaves that is the same to what is recorded
LESS = 0.7  # of what a set leaves: a bug that leaves more is not the largest of three
NEEDED = 100.0  # times what a set of bugs leaves is left without any of them
TIE = 10.0  # fits this much worse than the best are still the best's equals, as both are rounding


Key = tuple[tuple[str, str], ...]  # of a fit: bugs and their variants


@dataclass(frozen=True)
class Fit:
    """A replay, of one bug or of two on one op, and the NMSE that it leaves; ``part``: of these rows alone.

    ``proved``: how many of the steps, the first ones, were proved elsewhere: an engine has them here too.
    """

    steps: tuple[Change, ...]
    nmse: float
    part: Part | None = None
    proved: int = 0

    @property
    def own(self) -> tuple[Change, ...]:
        """What is said of it: the steps that were not proved elsewhere."""
        return self.steps[self.proved :]

    @property
    def causes(self) -> tuple[str, ...]:
        return tuple(step.bug.name for step in self.own)

    @property
    def key(self) -> Key:
        """What makes this fit the same one in another layer."""
        return tuple((step.bug.name, step.variant) for step in self.own)

    @property
    def values(self) -> list[float | None]:
        """The constants that were solved for."""
        return [step.value for step in self.own]

    @property
    def says(self) -> str:
        says = ", and ".join(step.says for step in self.own)
        return says if self.part is None else f"{says}, {self.part.words}"

    @property
    def harmless(self) -> bool:
        return all(step.bug.harmless for step in self.steps)


@dataclass(frozen=True)
class Outcome:
    """Fits (several: the model cannot tell them apart), or the nearest that do not fit.

    ``complete``: every known bug was tried. ``tried``: any was; of a span, ``every`` one that was.
    """

    fits: tuple[Fit, ...] = ()
    nearest: tuple[Fit, ...] = ()
    complete: bool = True
    every: tuple[Fit, ...] = ()

    @property
    def tried(self) -> bool:
        return bool(self.fits or self.nearest)


def search(case: Case, right: float, budget: Budget, pairs: bool = True, by_drop: bool = False) -> Outcome:
    """Try single exact bugs, then those with a constant, then pairs; stop at what fits.

    ``right`` is the NMSE that the right op leaves. Inputs that were not recorded rule bugs out. ``by_drop``: of a span
    whose rounding is unknown, take what leaves so much less than all else that no chance does that.
    """
    bugs = tuple(known_bugs().values())
    try:
        base = _right(case, right)
    except NotRecordedError:
        return Outcome()
    right = max(right, _error(case, base)) if len(case.carrier.ways) == 1 else right
    case = replace(_with_limits(case, right), budget=budget.beyond())
    quick, bare = _quickly(replace(case, budget=budget), base, right)
    fits, tried = _one_at_once(case, base, quick, bare, right)
    if fits:
        return Outcome(fits, ())
    fits = _confirmed(case, base, _pairs(quick, bare, bugs, Budget(PAIRS, budget.until, budget))) if pairs else ()
    if not fits and by_drop and base.is_span(case):
        fits = _by_drop(case, base, tried, right)
    return Outcome(fits, tuple(_nearest(tried)), not budget.is_spent, tuple(tried) if base.is_span(case) else ())


def search_beside(case: Case, right: float, budget: Budget, proved: Sequence[Fit]) -> Outcome:
    """The same for a span with the bugs that were proved elsewhere in it: what else is wrong there, if that is all."""
    try:
        base = _right(case, right)
    except NotRecordedError:
        return Outcome()
    steps, base = (
        _with_proved(case, base, [step for fit in proved for step in fit.own]) if base.is_span(case) else ((), base)
    )
    if not steps:
        return Outcome()
    left, limit = _error(case, base), _with_limits(case, right).limit
    if left <= limit:
        return Outcome((Fit(steps, left, proved=len(steps) - 1),))
    case = replace(_with_limits(case, left), budget=budget.beyond())
    quick, bare = _quickly(replace(case, budget=budget), base, left)
    fits, _ = _one_at_once(case, base, quick, bare, left)
    return Outcome(tuple(replace(fit, steps=(*steps, *fit.steps), proved=len(steps)) for fit in fits))


@dataclass(frozen=True)
class _Set:
    """Bugs in a span, of which the first were ``proved`` elsewhere, the nodes with them, and what they leave."""

    left: float
    steps: tuple[Change, ...]
    nodes: Subgraph
    proved: int = 0


def search_together(
    case: Case, right: float, budget: Budget, proved: Sequence[Fit], tried: Sequence[Fit]
) -> tuple[tuple[Fit, ...], ...]:
    """Several bugs in a span, beside those that were proved elsewhere: what fits of each; none if no few explain it.

    The bug after which the least is left comes first, then the one that does so of what is left: sets of bugs are
    looked at in the order of what they leave, those with proved ones first. ``tried``: single ones, of which none
    explains it.
    """
    try:
        base = _right(case, right)
    except NotRecordedError:
        return ()
    known, nodes = _with_proved(case, base, [step for fit in proved for step in fit.own])
    waiting = [*_followed(case, _Set(right, (), base), tried)]
    if known and (left := _error(case, nodes)) < right:
        waiting.append(_Set(left, known, nodes, len(known)))
    while waiting and not budget.is_spent:
        nearest = min(waiting, key=lambda each: (-each.proved, each.left))
        waiting.remove(nearest)
        fits, more = _next_bugs(case, nearest, budget)
        for fit in fits[:1]:
            steps = (*nearest.steps, *fit.steps)
            again = [Budget(CONFIRMING, budget.until + CONFIRMING_SECONDS) for _ in steps]
            every = [_beside(case, base, steps, own, fit.nmse, again[own]) for own in range(nearest.proved, len(steps))]
            if all(every):
                return tuple(every)
        if len(nearest.steps) - nearest.proved + 2 <= AT_ONCE:
            waiting += _followed(case, nearest, more)
    return ()


def _beside(
    case: Case, base: Subgraph, steps: Sequence[Change], own: int, nmse: float, budget: Budget
) -> tuple[Fit, ...]:
    """One of a set's bugs beside the others, or what fits in its place; none where little is left without it."""
    others, nodes = _with_proved(case, base, (*steps[:own], *steps[own + 1 :]))
    left = _error(case, nodes)
    if left < NEEDED * nmse:
        return ()
    fits, _ = _next_bugs(case, _Set(left, others, nodes), budget)
    return tuple(
        Fit((*others, *fit.steps), fit.nmse, proved=len(others)) for fit in fits or (Fit((steps[own],), nmse),)
    )


def _next_bugs(case: Case, some: _Set, budget: Budget) -> tuple[tuple[Fit, ...], list[Fit]]:
    """What fits of single bugs beside a set, and what was tried."""
    case = replace(_with_limits(case, some.left), budget=budget.beyond())
    try:
        quick, bare = _quickly(replace(case, budget=budget), some.nodes, some.left, anyhow=True)
        return _one_at_once(case, some.nodes, quick, bare, some.left)
    except NotRecordedError:  # or out of time
        return (), []


def _followed(case: Case, some: _Set, tried: Iterable[Fit]) -> Iterator[_Set]:
    """A set with one bug more: with those that leave the least of what it leaves; of those that leave the same, one."""
    count, last = Counter[str](), 0.0
    for fit in sorted((fit for fit in tried if fit.nmse < LESS * some.left), key=lambda fit: fit.nmse):
        name = fit.causes[0]
        if fit.harmless or fit.nmse <= SAME * last or count[name] == ALIKE or count.total() == WIDE:
            continue
        count[name], last = count[name] + 1, fit.nmse
        more, nodes = _with_proved(case, some.nodes, fit.steps)
        yield _Set(fit.nmse, (*some.steps, *more), nodes, some.proved)


def _with_proved(case: Case, base: Subgraph, proved: Iterable[Change]) -> tuple[tuple[Change, ...], Subgraph]:
    """Those of some bugs that a subgraph has a place for, with the constants that they have, and it with them."""
    steps, taken = tuple[Change, ...](), replace(case, limit=math.inf)  # whatever fits here: they were proved
    for step in proved:
        there = next(_chains(taken, base, [((step.bug.name, step.variant), step.value)]), None)
        steps, base = ((*steps, *there[0]), there[1]) if there is not None else (steps, base)
    return steps, base


def _one_at_once(
    case: Case, base: Subgraph, quick: Case, bare: Subgraph, right: float
) -> tuple[tuple[Fit, ...], list[Fit]]:
    """What fits of single bugs, exact ones first, and all that were tried; ``quick`` and ``bare``: to try them on."""
    bugs, tried = tuple(known_bugs().values()), list[Fit]()
    assert quick.budget is not None
    # of a span, bugs in all ops of a kind before those in one: an engine has one function for an op
    for where, general in product((True, False) if base.is_span(case) else (None,), (False, True)):
        found: list[Fit] = []
        some = [known for known in bugs if known.general == general]
        for fit in _singles(replace(quick, everywhere=where), bare, some, quick.budget):
            tried.append(fit)
            if fit.nmse <= _allowed(quick, fit):
                found.append(fit)
        fits = _confirmed(case, base, found)
        if not fits and general and where is not None:
            fits = _confirmed(case, base, _refined(replace(quick, everywhere=where), bare, tried, right))
        if fits:
            return fits, tried
    return (), tried


def search_part(case: Case, budget: Budget) -> Outcome:
    """The same for the rows that are wrong where others are right: what an engine does to these alone."""
    try:
        base = subgraph_of(case)
        right = base.compute(case)
    except NotRecordedError:
        return Outcome()
    part = case.part_of(right)
    if part is None:
        return Outcome()
    case = replace(case, part=part)
    found = search(case, case.nmse(right), budget, pairs=False).fits
    return Outcome(tuple(replace(fit, part=part) for fit in found))


def _by_drop(case: Case, base: Subgraph, tried: Sequence[Fit], right: float) -> tuple[Fit, ...]:
    """The bug that leaves little of an error, where every other one leaves much more: what is left is rounding."""
    left = sorted((fit for fit in tried if not fit.harmless and math.isfinite(fit.nmse)), key=lambda fit: fit.nmse)
    if not left or left[0].nmse > min(DROPS * right, _roughly(case, base)):
        return ()
    best = [fit for fit in left if fit.nmse <= AS_GOOD * left[0].nmse]
    names = {fit.causes for fit in best}
    others = [fit.nmse for fit in left if fit.causes not in names]
    if len(names) > FEW_BEST or (others and min(others) < CLEARLY * left[0].nmse):
        return ()
    return _confirmed(replace(case, limit=AS_GOOD * left[0].nmse), base, best)


def _roughly(case: Case, base: Subgraph) -> float:
    """How far from float32 rounding to 8 bits may take the right op: NMSE."""
    ways = [(policy, case.carrier.ways[0][1]) for policy in (F32, COARSE)]
    run = replace(case.run, carrier=Carrier(ways, edges=case.carrier.edges))
    found = base.afresh.compute(replace(case, run=run))  # one for both, where nothing is multiplied
    return case.nmse_between(found[-1], found[0])


def _quickly(case: Case, base: Subgraph, right: float, anyhow: bool = False) -> tuple[Case, Subgraph]:
    """The case in one arithmetic, with limits as wide as arithmetics lie apart; as it is, where that is too wide.

    ``anyhow``: then with what separates, to be confirmed.
    """
    one = replace(case, run=replace(case.run, carrier=case.carrier.first))
    apart = max(case.nmse_between(x, base.compute(case)[0]) for x in base.compute(case))
    limit = (math.sqrt(case.limit) + FURTHER * math.sqrt(apart)) ** 2
    if limit > SEPARATES * right and not anyhow:
        return case, base
    limit = min(limit, SEPARATES * right)
    return replace(one, limit=limit, slack=max(case.slack, limit)), base.afresh


def _refined(case: Case, base: Subgraph, tried: Iterable[Fit], right: float) -> list[Fit]:
    """Constants of a span, solved for where a familiar value comes nearer than the right op, or the error lies in the
    direction in which the constant moves the result.
    """
    fits = [fit for fit in tried if fit.steps[0].value is not None]
    near = [(fit.nmse, fit.key, fit.steps[0].value) for fit in fits if fit.nmse < NEARER * right]
    near += [each for each in _along(fits, right) if each[0] < ALONG * right]
    first = {key: (nmse, value) for nmse, key, value in sorted(near, key=lambda each: -each[0])}
    order = list(known_bugs())

    def rank(key: Key) -> tuple[bool, float]:
        """What leaves nearly nothing first, the likelier bug before others; then by what is left."""
        leaves = first[key][0]
        return leaves > EXPLAINS * right, order.index(key[0][0]) if leaves <= EXPLAINS * right else leaves

    nearest = [(key, first[key][1]) for key in sorted(first, key=rank)[:REFINED]]
    found = [_chain(case, base, key, [value]) for key, value in nearest]
    return [fit for fit in found if fit is not None and fit.nmse <= _allowed(case, fit)]


def _along(fits: Sequence[Fit], right: float) -> Iterator[tuple[float, Key, float]]:
    """What would be left of an error by the constant that its direction tells, of each bug that was tried beside the
    model's own constant.
    """
    left = {(fit.key, fit.steps[0].value): fit.nmse for fit in fits}
    for key, own in {fit.key: fit.steps[0].own for fit in fits if fit.steps[0].own}.items():
        beside = [left.get((key, own * factor)) for factor in (1 + PROBE, 1 - PROBE)]
        if beside[0] is not None and beside[1] is not None:
            value, nmse = lowest(own, right, beside[0], beside[1])
            yield nmse, key, value


def exact_bugs(case: Case) -> Iterator[tuple[Fit, Mapping[int, Alter]]]:
    """Every known bug without a constant at a case's op, of which nothing was recorded: what each alters."""
    with suppress(NotRecordedError):
        base = subgraph_of(case)
        for known in known_bugs().values():
            for change, changed in () if known.general or known.harmless else changes_of(known, base, case):
                yield Fit((change,), math.nan), changed.altered


def replayed(
    case: Case, right: float, key: Sequence[tuple[str, str]], hints: Sequence[float | None], leaves: float = EXPLAINS,
    part: Part | None = None, proved: Sequence[Change] = (),
) -> Fit | None:  # fmt: skip
    """The same fit at another tap: None if it does not fit there. ``leaves``: how much of the error it may leave.

    ``proved``: bugs that were proved elsewhere, which an engine has here too.
    """
    try:
        base = _right(case, right)
    except NotRecordedError:
        return None
    steps, base = _with_proved(case, base, proved)
    if part is not None:
        if not part.has_all(case.wrong_rows(base.compute(case))):
            return None
        case = replace(case, part=part)
        right = case.nmse(base.compute(case))
    case = _with_limits(case, right, leaves)
    found = _chain(case, base, key, hints)
    found = None if found is None else replace(found, steps=(*steps, *found.steps), part=part, proved=len(steps))
    return found if found is not None and found.nmse <= _allowed(case, found) else None


def is_hidden(case: Case, fit: Fit) -> bool:
    """Whether a bug that was found elsewhere would leave a right tap within its limit."""
    try:
        found = _chain(case, subgraph_of(case), fit.key, fit.values)
    except NotRecordedError:
        return False
    return found is not None and found.values == fit.values and found.nmse <= case.limit


def _with_limits(case: Case, right: float, leaves: float = EXPLAINS) -> Case:
    """The case with what a fit may leave of the right op's error; a rounding that is done otherwise leaves more."""
    slack = max(VARIES * right, min(case.limit, MOST * right)) if math.isfinite(right) else case.limit
    limit = leaves * right if leaves > EXPLAINS else min(case.limit, EXPLAINS * right)
    return replace(case, limit=limit, slack=slack)


def _right(case: Case, right: float) -> Subgraph:
    """The nodes that make a case's tap. Raises NotRecordedError where they do not give what the judge computed.

    Here all arithmetics are tried. Of those that the judge left out after some layers, one may be a little nearer; and
    where one is known to be the engine's, another one may have been nearer to what is wrong.
    """
    base = subgraph_of(case)
    distance, ours = math.sqrt(right), math.sqrt(_error(case, base))
    most = 1.001 * distance + OTHER_SUMS if len(case.carrier.ways) > 1 else math.inf
    if math.isfinite(right) and not (math.sqrt(PARTLY) * distance - OTHER_SUMS <= ours <= most):
        raise NotRecordedError(case.tap.name)
    return base


def _allowed(case: Case, fit: Fit) -> float:
    """What a fit may leave."""
    return case.slack if fit.harmless else case.limit


def _singles(case: Case, base: Subgraph, bugs: Iterable[Bug], budget: Budget) -> Iterator[Fit]:
    best = math.inf

    def asked() -> Changes:
        for known in bugs:
            if best > EXACT or known.family != SLOWEST:
                yield from changes_of(known, base, case)

    changes, again = tee(takewhile(lambda _: not budget.is_spent, asked()))
    for (change, _), nmse in zip(changes, errors(case, (changed for _, changed in again)), strict=True):
        best = min(best, nmse)
        yield Fit((change,), nmse)


def _pairs(case: Case, base: Subgraph, bugs: Sequence[Bug], budget: Budget) -> list[Fit]:
    """Two bugs on one op: an exact one, and another that still finds the same kind of op there.

    A span of ops has none: tens of thousands of pairs fit too much.
    """
    if base.is_span(case):
        return []
    case = replace(case, budget=budget)
    asked = takewhile(lambda _: not budget.is_spent, _two_at_once(case, base, bugs))
    steps, again = tee(asked)
    tried = zip(steps, errors(case, (sub for _, sub in again)), strict=True)
    return [Fit(both, nmse) for (both, _), nmse in tried if nmse <= 10 * case.limit]


def _two_at_once(case: Case, base: Subgraph, bugs: Sequence[Bug]) -> Iterator[tuple[tuple[Change, Change], Subgraph]]:
    hurried = replace(case, hurried=True)
    exact = [known for known in bugs if not known.general and not known.harmless]
    for number, first in enumerate(exact):
        for change, changed in changes_of(first, base, case):
            for second in [*exact[number + 1 :], *(known for known in bugs if known.general)]:
                for other, both in changes_of(second, changed, hurried):
                    yield (change, other), both


def _confirmed(case: Case, base: Subgraph, found: Sequence[Fit]) -> tuple[Fit, ...]:
    """Those that fit on all values, best first, with their equals; what is harmless wins."""
    fits = []
    for fit in sorted(found, key=lambda fit: fit.nmse)[:12]:
        whole = _chain(case, base, fit.key, fit.values)
        if whole is not None and whole.nmse <= _allowed(case, whole) and not _is_any(case, base, whole):
            fits.append(whole)
    if not all(fit.harmless for fit in fits):
        fits = [fit for fit in fits if fit.nmse <= case.limit]
    assert case.recorded is not None
    if not np.isfinite(case.recorded).all():  # what is Inf or NaN is never noise
        fits = [fit for fit in fits if not fit.harmless]
    elif any(fit.harmless for fit in fits):
        fits = [fit for fit in fits if fit.harmless]
    fits.sort(key=lambda fit: fit.nmse)
    floor = max(TIE * fits[0].nmse, 1e-12) if fits else 0.0
    return likeliest_first({fit.says: fit for fit in reversed(fits) if fit.nmse <= floor}.values())


def _is_any(case: Case, base: Subgraph, fit: Fit) -> bool:
    """Whether half of a small constant fits as well: then the op gives nothing, as many mistakes make it."""
    value, own = fit.steps[0].value, fit.steps[0].own
    if value is None or not own or abs(value) > SMALL * own:
        return False
    half = _chain(case, base, fit.key, [value / 2])
    return half is not None and half.steps[0].value == value / 2 and half.nmse <= _allowed(case, half)


def likeliest_first(fits: Iterable[Fit]) -> tuple[Fit, ...]:
    """Fits that nothing tells apart, those of one bug and of the commoner families first."""
    order = list(known_bugs())
    return tuple(sorted(fits, key=lambda fit: (len(fit.causes), [order.index(cause) for cause in fit.causes])))


def _chain(case: Case, base: Subgraph, key: Sequence[tuple[str, str]], hints: Sequence[float | None]) -> Fit | None:
    """Replay bugs one after another on one op: the first way that fits, or else the best; None if there is none."""
    best: Fit | None = None
    for steps, changed in _chains(case, base, tuple(zip(key, hints, strict=True))):
        fit = Fit(steps, _error(case, changed))
        best = fit if best is None or fit.nmse < best.nmse else best
        if fit.nmse <= case.limit:
            break
    return best


def _chains(
    case: Case, sub: Subgraph, key: Sequence[tuple[tuple[str, str], float | None]]
) -> Iterator[tuple[tuple[Change, ...], Subgraph]]:
    """Every way to have these bugs one after another: a bug shows at several ops of a graph."""
    if not key:
        yield (), sub
        return
    ((name, variant), hint), *rest = key
    for change, once in changes_of(known_bugs()[name], sub, replace(case, hint=hint)):
        if change.variant == variant:
            for steps, changed in _chains(case, once, rest):
                yield (change, *steps), changed


def _error(case: Case, sub: Subgraph) -> float:
    return next(errors(case, [sub]))


def _nearest(tried: Sequence[Fit], most: int = 3) -> Iterator[Fit]:
    """The nearest of different bugs."""
    seen: set[str] = set()
    for fit in sorted(tried, key=lambda fit: fit.nmse):
        if np.isfinite(fit.nmse) and fit.causes[0] not in seen and not fit.harmless and len(seen) < most:
            seen.add(fit.causes[0])
            yield fit
