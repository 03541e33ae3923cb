"""Why a tokenizer gives other ids: the changes to the independent one that give the same ids, for all texts tried."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile

from llamaref import ModelError

from llamadiff.ext.prompt.tokenizer import Tokenizer, as_original
from llamadiff.ext.prompt.tokens.changes import Change, Encode, Ids, Pair, changed, changes_of, own_changes

TRIED = 64  # of the texts that part, and of the others: those on which each change is tried first
MOST = 3  # mistakes at once
OTHERS = 2  # changes that explain the same, and are told too


@dataclass(frozen=True)
class Explanation:
    """The ``changes`` that give the candidate's ids for all texts; ``others`` of which each alone gives them, too."""

    changes: tuple[Change, ...]
    others: tuple[Change, ...] = ()

    @property
    def mistakes(self) -> tuple[Change, ...]:
        """Those that are no ways of the model's own tokenizer."""
        return tuple(change for change in self.changes if not change.own)


class _Seen:
    """A candidate's ids of texts: those to try first, and the rest."""

    def __init__(self, texts: Sequence[str], found: Sequence[Ids | None], right: Sequence[Ids | None]) -> None:
        self.texts, self.found = texts, found
        parted = sorted((n for n in range(len(texts)) if found[n] != right[n]), key=lambda n: len(texts[n]))
        same = [n for n in range(len(texts)) if found[n] == right[n]]
        self.few = [*parted[: TRIED // 2], *_spread(parted, TRIED // 2), *_spread(same, TRIED)]
        self.all = [*parted, *same]
        self.parted: list[Pair] = [
            (texts[n], a, b) for n in parted if (a := found[n]) is not None and (b := right[n]) is not None
        ]

    def holds(self, encode: Encode, numbers: Sequence[int]) -> bool:
        return all(encode(self.texts[n]) == self.found[n] for n in numbers)

    def score(self, encode: Encode) -> tuple[int, float]:
        """Of the first texts: how many have the candidate's ids, and how much the others have in common with them."""
        pairs = [(encode(self.texts[n]), self.found[n] or ()) for n in self.few]
        return sum(a == b for a, b in pairs), sum(_common(a, b) for a, b in pairs)


def _spread(numbers: Sequence[int], count: int) -> Sequence[int]:
    """So many of them, from all over."""
    return numbers[:: max(1, len(numbers) // count)][:count]


def _common(one: Ids, other: Ids) -> float:
    """The share of what is the same at both ends."""
    if one == other:
        return 1.0
    most = min(len(one), len(other))
    first = len([*takewhile(bool, (a == b for a, b in zip(one, other, strict=False)))])
    last = len([*takewhile(bool, (a == b for a, b in zip(one[::-1], other[::-1], strict=False)))])
    return min(first + last, most) / max(len(one), len(other))


def explain(
    tokenizer: Tokenizer, texts: Sequence[str], found: Sequence[Ids | None], right: Sequence[Ids | None]
) -> Explanation | None:
    """What gives a candidate's ``found`` for all texts: one change, or up to three; None where nothing known does.

    ``tokenizer``: as llama.cpp reads the file; ``right``: its ids.
    """
    seen, rules = _Seen(texts, found, right), tokenizer.rules
    changes = [*changes_of(tokenizer, seen.parted)]
    for base in (tokenizer, tokenizer.with_rules(as_original(rules))):
        alone = tuple(_alone(base, changes, seen))
        if alone:
            return Explanation(alone[:1], alone[1:])
    return _several(tokenizer, [*own_changes(rules), *changes], seen)


def _alone(base: Tokenizer, changes: Sequence[Change], seen: _Seen) -> Iterator[Change]:
    """The changes each of which explains all; a few."""
    count = 0
    for change in changes:
        with suppress(ModelError):
            encode = changed(base, [change])
            if seen.holds(encode, seen.few) and seen.holds(encode, seen.all):
                yield change
                count += 1
                if count > OTHERS:
                    return


def _several(tokenizer: Tokenizer, changes: Sequence[Change], seen: _Seen) -> Explanation | None:
    """The change that comes nearest, then the one that does beside it, until all is explained."""
    taken: list[Change] = []
    best = seen.score(changed(tokenizer, taken))
    while sum(not change.own for change in taken) < MOST:
        tried: list[tuple[tuple[int, float], int]] = []
        for n, change in enumerate(changes):
            if any(change.rules.keys() & other.rules.keys() for other in taken) or change in taken:
                continue
            with suppress(ModelError):
                tried.append((seen.score(changed(tokenizer, [*taken, change])), -n))
        score, n = max(tried, default=(best, 0))
        if score <= best:
            return None
        best = score
        taken.append(changes[-n])
        if best[0] == len(seen.few) and seen.holds(changed(tokenizer, taken), seen.all):
            return Explanation(tuple(taken))
    return None
