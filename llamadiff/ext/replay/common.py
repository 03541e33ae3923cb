"""What wrong cases have in common that right ones have not: a size beside a tile or beyond one, a kind of values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, pairwise

from llamadiff.ext.replay.cases import AS_SAVED, count
from llamadiff.ext.replay.kernel_result import CaseRun
from llamadiff.ext.replay.values import RANDOM
from llamadiff.judge.verdict import WRONG

_MOST_SPARED = 5  # kinds of values in which a fault does not show
EVERYWHERE = "in every case"
_TILES = (2, 4, 8, 16, 32, 64, 128, 256, 1024)


@dataclass(frozen=True)
class Trait:
    """Something that some cases (their numbers) have; ``words`` go on after "wrong"."""

    words: str
    cases: frozenset[int]


def common_trait(cases: Sequence[CaseRun]) -> str:
    """What all wrong cases have and no right one: the simplest trait, one of two, or one but for some kinds of values.

    Empty where no case is wrong, or nothing tells them apart.
    """
    wrong = frozenset(case.number for case in cases if case.verdict == WRONG)
    right = frozenset(case.number for case in cases if case.is_right)
    if not wrong or len(cases) == 1:
        return ""
    if not right:
        return EVERYWHERE if len(wrong) == len(cases) else ""
    traits = list(_traits(cases))
    held, clean = [each for each in traits if wrong <= each.cases], [each for each in traits if not right & each.cases]
    said = chain(
        (f"only {each.words}" for each in held if each in clean),
        _of_kinds(cases, wrong, right),
        (f"only {one.words}, or {two.words}" for one, two in combinations(clean, 2) if wrong <= one.cases | two.cases),
        _but_for(cases, wrong, right, held),
    )
    return next(said, "")


def _of_kinds(cases: Sequence[CaseRun], wrong: frozenset[int], right: frozenset[int]) -> Iterator[str]:
    """That some kinds of values are wrong, whatever the sizes, and no others."""
    kinds = dict.fromkeys(case.values for case in cases if case.number in wrong)
    others = {AS_SAVED, RANDOM} | {case.values for case in cases if case.number in right}
    if not kinds.keys() & others:
        *first, last = kinds
        yield f"only with {', '.join(first)}, or {last}"


def _but_for(
    cases: Sequence[CaseRun], wrong: frozenset[int], right: frozenset[int], held: Sequence[Trait]
) -> Iterator[str]:
    """Traits that right cases have too, all of them of kinds of values with which none is wrong."""
    telling = {case.values for case in cases if case.number in wrong} | {AS_SAVED, RANDOM}
    for trait in (None, *held):
        own = right if trait is None else right & trait.cases
        spared = dict.fromkeys(case.values for case in cases if case.number in own)
        if len(spared) <= _MOST_SPARED and not telling & spared.keys():
            kinds = ", ".join(spared)
            yield f"in all but {kinds}" if trait is None else f"only {trait.words}, but not with {kinds}"


def _traits(cases: Sequence[CaseRun]) -> Iterator[Trait]:
    for kind in dict.fromkeys(case.values for case in cases if case.values not in (AS_SAVED, RANDOM)):
        yield Trait(f"with {kind}", frozenset(case.number for case in cases if case.values == kind))
    for name in dict.fromkeys(name for case in cases for name in case.sizes):
        for words, sizes in _sizes(name, sorted({case.sizes[name] for case in cases if name in case.sizes})):
            yield Trait(words, frozenset(case.number for case in cases if case.sizes.get(name) in sizes))


def _sizes(name: str, sizes: Sequence[int]) -> Iterator[tuple[str, set[int]]]:
    """Sizes of an axis that have something in common."""
    yield f"with {count(1, name)}", {1}
    yield f"with more than {count(1, name)}", {size for size in sizes if size > 1}
    for tile in _TILES:
        whole = {size for size in sizes if size % tile == 0}
        yield f"where the number of {name} is not a multiple of {tile}", {*sizes} - whole
        yield f"where the number of {name} is a multiple of {tile}", whole
    for low, high in pairwise(sizes):
        beside = high == low + 1
        above = f"more than {count(low, name)}" if beside else f"{high} {name} and more (with {low} it is right)"
        below = f"fewer than {count(high, name)}" if beside else f"{low} {name} and fewer (with {high} it is right)"
        yield f"with {above}", {size for size in sizes if size > low}
        yield f"with {below}", {size for size in sizes if size < high}
