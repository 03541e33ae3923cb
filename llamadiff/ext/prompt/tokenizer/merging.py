"""A word into tokens: merges of neighbours, best first, as BPE and SentencePiece's BPE do; or the longest tokens."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise


def merged(symbols: Sequence[str], rank: Callable[[tuple[str, str]], float | None]) -> list[str]:
    """Neighbours are joined until no pair has a rank: the lowest first, of equal ones the leftmost.

    Sennrich et al. 2016 (arXiv 1508.07909), algorithm 1, with a heap in place of a search. ``rank`` is of a pair; None:
    it is not merged.
    """
    parts, end = list(symbols), len(symbols)
    before, after = [*range(-1, end - 1)], [*range(1, end + 1)]
    heap = [(r, i, pair) for i, pair in enumerate(pairwise(parts)) if (r := rank(pair)) is not None]
    heapify(heap)
    while heap:
        _, i, (left, right) = heappop(heap)
        j = after[i]
        if j == end or parts[i] != left or parts[j] != right:
            continue  # one of the two has been merged since
        parts[i], parts[j] = left + right, ""
        h, j = before[i], after[j]
        after[i] = j
        if j < end:
            before[j] = i
            if (r := rank(pair := (parts[i], parts[j]))) is not None:
                heappush(heap, (r, i, pair))
        if h >= 0 and (r := rank(pair := (parts[h], parts[i]))) is not None:
            heappush(heap, (r, h, pair))
    return [part for part in parts if part]


def longest(word: str, known: Container[str], most: int) -> Iterator[str]:
    """At each place the longest token, of up to ``most`` characters; a character where there is none.

    No BPE does so: engines that forget merges do.
    """
    at = 0
    while at < len(word):
        ends = range(min(len(word), at + most), at, -1)
        end = next((end for end in ends if word[at:end] in known), at + 1)
        yield word[at:end]
        at = end
