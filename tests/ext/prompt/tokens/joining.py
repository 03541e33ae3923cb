"""Ways from characters to tokens: merges, the longest token, the best sum of scores."""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any


def merged(symbols: list[Any], rank: Callable[[Any, Any], Any], side: int = 1) -> list[Any]:
    """Joins two neighbours, always those of the lowest rank, of equal ones the leftmost; None: they do not join."""
    count, heap = len(symbols), list[tuple[Any, ...]]()
    before, after = [*range(-1, count - 1)], [*range(1, count + 1)]

    def offer(i: int, j: int) -> None:
        if i >= 0 and j < count and (found := rank(symbols[i], symbols[j])) is not None:
            heappush(heap, (found, i * side, j, len(symbols[i]) + len(symbols[j])))

    for i in range(count - 1):
        offer(i, i + 1)
    while heap:
        _, i, j, size = heappop(heap)
        i *= side
        if not symbols[i] or not symbols[j] or len(symbols[i]) + len(symbols[j]) != size:
            continue  # one of them has joined another
        symbols[i], symbols[j] = symbols[i] + symbols[j], symbols[j][:0]
        after[i] = after[j]
        if after[j] < count:
            before[after[j]] = i
        offer(before[i], i)
        offer(i, after[i])
    return [symbol for symbol in symbols if symbol]


def longest(text: Any, table: dict[Any, int], most: int) -> list[Any]:
    """Cuts off the longest token again and again; what starts none goes one by one."""
    at, found = 0, []
    while at < len(text):
        end = next((end for end in range(min(len(text), at + most), at, -1) if text[at:end] in table), at + 1)
        found.append(text[at:end])
        at = end
    return found


def likeliest(symbols: Sequence[bytes], table: dict[bytes, int], scores: Sequence[float], most: int) -> list[bytes]:
    """The way through a text with the best sum of scores; a symbol that is no token costs more than any."""
    best = [(0.0, 0)] + [(float("-inf"), 0)] * len(symbols)
    worst = min(scores) - 10
    for end in range(1, len(symbols) + 1):
        for start in range(max(0, end - most), end):
            i = table.get(b"".join(symbols[start:end]))
            if i is not None or end - start == 1:
                best[end] = max(best[end], (best[start][0] + (worst if i is None else scores[i]), start))
    end, found = len(symbols), []
    while end:
        found.append(b"".join(symbols[best[end][1] : end]))
        end = best[end][1]
    return found[::-1]
