"""Why a tokenizer gives other ids: changes to the independent one that give the same ids, for all texts or nearly."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile

from llamaref import ModelError

from llamadiff.ext.prompt.tokenizer import Tokenizer, as_original
from llamadiff.ext.prompt.tokens.changes import (
    Change,
    Encode,
    Ids,
    Pair,
    changed,
    changes_of,
    own_changes,
    pre_tokenizers,
)

TRIED = 64  # of the texts that part, and of the others: those on which each change is tried first
MOST = 3  # mistakes at once
OTHERS = 2  # changes that explain the same, and are told too
NEARLY = 0.9  # of the texts that part: changes that give the ids of so many are named, with their share


@dataclass(frozen=True)
class Explanation:
    """The ``changes`` that give the candidate's ids; ``others`` of which each alone gives them, too.

    ``left``: numbers of the texts for which they do not, few beside those for which they do.
    """

    changes: tuple[Change, ...]
    others: tuple[Change, ...] = ()
    left: tuple[int, ...] = ()

    @property
    def mistakes(self) -> tuple[Change, ...]:
        """Those that are no ways of the model's own tokenizer."""
        return tuple(change for change in self.changes if not change.own)


class _Seen:
    """A candidate's ids of texts: those to try first, and the rest."""

    def __init__(self, texts: Sequence[str], found: Sequence[Ids | None], right: Sequence[Ids | None]) -> None:
        self.texts, self.found = texts, found
        self.numbers = sorted((n for n in range(len(texts)) if found[n] != right[n]), key=lambda n: len(texts[n]))
        parted = self.numbers
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
    tokenizer: Tokenizer, texts: Sequence[str], found: Sequence[Ids | None], right: Sequence[Ids | None],
    stated: Collection[str] = (),
) -> Explanation | None:  # fmt: skip
    """What gives a candidate's ``found``: one change, or up to three; None where nothing known gives nearly all.

    ``tokenizer``: as llama.cpp reads the file; ``right``: its ids. ``stated``: pre-tokenizers whose expressions the
    candidate states, which are tried before others that give the same ids.
    """
    seen, rules = _Seen(texts, found, right), tokenizer.rules
    changes, named = [*changes_of(tokenizer, seen.parted)], [*pre_tokenizers(rules, stated)]
    for change in named:
        original = as_original(replace(rules, **change.rules))
        if any(_alone(tokenizer.with_rules(original), [change], seen)):
            return Explanation((change,))
    for base in (tokenizer, tokenizer.with_rules(as_original(rules))):
        alone = tuple(_alone(base, changes, seen))
        if alone:
            return Explanation(alone[:1], alone[1:])
    return _several(tokenizer, seen, named)


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


def _several(tokenizer: Tokenizer, seen: _Seen, named: Sequence[Change]) -> Explanation | None:
    """The change that comes nearest, then the one that does of the texts that it leaves, until all is explained;
    ``named`` are tried first.
    """
    taken: list[Change] = []
    left = [seen.numbers]  # of none, one, two ... of what is taken: the texts that it leaves
    while (
        sum(not change.own for change in taken) < MOST
        and (change := _nearest(tokenizer, taken, seen, named)) is not None
    ):
        taken.append(change)
        encode = changed(tokenizer, taken)
        seen = _Seen(seen.texts, seen.found, [encode(text) for text in seen.texts])
        if not seen.numbers:
            return Explanation(tuple(taken))
        left.append(seen.numbers)
    while len(left) > 1 and len(left[-1]) > len(left[-2]) / 2:  # it fits what was tried first, and little else
        left.pop()
    kept = tuple(taken[: len(left) - 1])
    is_nearly_all = len(left[-1]) <= (1 - NEARLY) * len(left[0])
    return Explanation(kept, left=tuple(left[-1])) if is_nearly_all and not all(c.own for c in kept) else None


def _nearest(tokenizer: Tokenizer, taken: Sequence[Change], seen: _Seen, named: Sequence[Change]) -> Change | None:
    """The change that, beside those ``taken``, gives the ids of the most texts; None where none gives more."""
    best, nearest = seen.score(changed(tokenizer, taken)), None
    for change in (*named, *own_changes(tokenizer.rules), *changes_of(tokenizer, seen.parted)):
        if any(change.rules.keys() & other.rules.keys() or change.name == other.name for other in taken):
            continue
        with suppress(ModelError):
            score = seen.score(changed(tokenizer, [*taken, change]))
            if score > best:
                best, nearest = score, change
    return nearest
