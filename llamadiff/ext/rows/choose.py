"""Which tokens of a long prompt are looked at: its ends, both sides of every edge, and some by chance.

Both processes choose, and alike: the one that runs llama.cpp knows first how many tokens there are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from random import Random

FIRST, LAST, BESIDE, BY_CHANCE = 8, 64, 4, 64  # tokens; BESIDE: on each side of an edge
SEED = 1
# Where numbers end that positions are kept in: exact in bfloat16 and float16, below int16's end. And usual sizes of
# windows, rings and original contexts, which engines have though the file does not say so.
EDGES = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
AUTO, ALL = "auto", "all"
_RANGE = re.compile("([0-9]{1,9})(?:-([0-9]{1,9}))?")


def ranges(words: str) -> list[range] | None:
    """``0-7,4090-4100`` as ranges, each with its end; None for what is not written so."""
    matches = [_RANGE.fullmatch(word.strip()) for word in words.split(",")]
    found = [range(int(match[1]), int(match[2] or match[1]) + 1) for match in matches if match]
    return found if len(found) == len(matches) and all(found) else None


def chosen(words: str, total: int) -> tuple[int, ...]:
    """The tokens of ``total`` that ``words`` stand for: ``0-7,4096``, or ``auto``, behind which ``:`` more edges may
    stand; those beyond the end are left out.
    """
    name, _, edges = words.partition(":")
    asked = ranges(words) if name != AUTO else None
    more = map(int, filter(None, edges.split(",")))
    places = automatic(total, more) if asked is None else [place for each in asked for place in each]
    return tuple(sorted({place for place in places if place < total}))


def automatic(total: int, edges: Iterable[int]) -> list[int]:
    """The first and the last tokens, those beside every edge, and some by chance."""
    beside = [edge + by for edge in (*EDGES, *edges) for by in range(-BESIDE, BESIDE) if edge + by >= 0]
    by_chance = Random(SEED).sample(range(total), min(BY_CHANCE, total))  # noqa: S311  # no secret
    return [*range(FIRST), *range(max(0, total - LAST), total), *beside, *by_chance]


def has_gaps(positions: Sequence[int]) -> bool:
    """Whether rows are some of a longer prompt's: between them others were run."""
    return any(after != before + 1 for before, after in pairwise(positions))


def in_words(rows: Sequence[int], most: int = 0) -> str:
    """``0-7, 252-259``; no more than ``most`` ranges, if that is given, and how many there are."""
    parts = list[list[int]]()
    for row in rows:
        if parts and parts[-1][1] == row - 1:
            parts[-1][1] = row
        else:
            parts.append([row, row])
    said = [str(first) if first == last else f"{first}-{last}" for first, last in parts]
    return ", ".join(said) if not most or len(said) <= most else f"{', '.join(said[:most])} and {len(said) - most} more"


LONG, LONG_TEXT = 2048, 8192  # tokens, and characters of a text that may have so many


def is_asked(words: str | None, text: str | None, tokens: int) -> bool:
    """Whether rows are to be judged: those that are asked for, and of a long prompt, unless all are."""
    if words is not None:
        return words != ALL
    return tokens > LONG or (text is not None and len(text) > LONG_TEXT)
