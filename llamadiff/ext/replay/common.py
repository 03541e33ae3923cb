"""What wrong cases have in common that right ones have not: an axis' size against a tile, more than some, a kind of values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from llamadiff.ext.replay.cases import AS_SAVED, count
from llamadiff.ext.replay.kernel_result import CaseRun
from llamadiff.ext.replay.values import RANDOM
from llamadiff.judge.verdict import WRONG

_TILES = (2, 4, 8, 16, 32, 64, 128, 256, 1024)


@dataclass(frozen=True)
class Trait:
    """Something that a case has or has not; ``words`` go on after "where"."""

    words: str
    holds: Callable[[CaseRun], bool]


def common_trait(cases: Sequence[CaseRun]) -> str:
    """The first trait, the simplest ones first, that all wrong cases have and no right one; else one that these have.

    Empty where no case is wrong, or nothing tells them apart.
    """
    wrong, right = [case for case in cases if case.verdict == WRONG], [case for case in cases if case.is_right]
    if not wrong:
        return ""
    if not right:
        return "in every case" if len(wrong) > 1 else ""
    held = [trait for trait in _traits(cases) if all(map(trait.holds, wrong))]
    counts = [sum(map(trait.holds, right)) for trait in held]
    if 0 in counts:
        return f"only {held[counts.index(0)].words}"
    both = _either(cases, wrong, right)
    if both:
        return f"only {both}"
    fewest = min(counts, default=len(right))
    if 2 * fewest > len(right):
        return ""
    beside = f"{fewest} case{'s' * (fewest > 1)} of this kind {'are' if fewest > 1 else 'is'} right"
    return f"only {held[counts.index(fewest)].words}; {beside}"


def _either(cases: Sequence[CaseRun], wrong: Sequence[CaseRun], right: Sequence[CaseRun]) -> str:
    """Two traits one of which every wrong case has, and no right one."""
    clean = [trait for trait in _traits(cases) if any(map(trait.holds, wrong)) and not any(map(trait.holds, right))]
    for first, second in combinations(clean, 2):
        if all(first.holds(case) or second.holds(case) for case in wrong):
            return f"{first.words}, or {second.words}"
    return ""


def _traits(cases: Sequence[CaseRun]) -> Iterator[Trait]:
    kinds = dict.fromkeys(case.values for case in cases if case.values not in (AS_SAVED, RANDOM))
    yield from (Trait(f"with {kind}", lambda case, kind=kind: case.values == kind) for kind in kinds)  # type: ignore[misc]
    for name in dict.fromkeys(name for case in cases for name in case.sizes):
        yield from _of_size(name, sorted({case.sizes[name] for case in cases if name in case.sizes}))


def _of_size(name: str, sizes: Sequence[int]) -> Iterator[Trait]:
    def trait(words: str, holds: Callable[[int], bool]) -> Trait:
        return Trait(words, lambda case: name in case.sizes and holds(case.sizes[name]))

    yield trait(f"with {count(1, name)}", lambda size: size == 1)
    yield trait(f"with more than {count(1, name)}", lambda size: size > 1)
    for tile in _TILES:
        yield trait(f"where the number of {name} is not a multiple of {tile}", lambda size, tile=tile: size % tile != 0)  # type: ignore[misc]
        yield trait(f"where the number of {name} is a multiple of {tile}", lambda size, tile=tile: size % tile == 0)  # type: ignore[misc]
    for low, high in zip(sizes, sizes[1:], strict=False):
        yield trait(f"with more than {count(low, name)}", lambda size, low=low: size > low)  # type: ignore[misc]
        yield trait(f"with fewer than {count(high, name)}", lambda size, high=high: size < high)  # type: ignore[misc]
