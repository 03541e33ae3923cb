"""What queries saw in a sentence: the law that all of them keep to, or what the first of them saw.

They are named by their positions, and not as rows are, which are said of their tokens later (positions.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import gcd
from typing import Any, Protocol

from llamadiff.ext.rows.choose import in_words
from llamadiff.ext.rows.row_engine import RowEngine
from llamadiff.ext.rows.seen import OUTPUT, PAGES, Seen, attention_of, seen_in
from llamadiff.judge.fact import Fact
from llamadiff.trace.taps import Tap

FEW = 3  # queries that are named one by one
PARTS = 4  # runs of keys that are listed


class WrongTap(Protocol):
    """What is asked of a case (ext/explain/case.py)."""

    @property
    def tap(self) -> Tap: ...

    @property
    def engine(self) -> Any: ...


def seen_keys(case: WrongTap, sure: bool) -> tuple[Fact, ...]:
    """What the queries of a layer saw whose output is off. Unless that is ``sure``, it is told of all or of none."""
    engine, layer = case.engine, case.tap.layer
    if case.tap.kind.word != OUTPUT or layer is None or not isinstance(engine, RowEngine):
        return ()
    if layer not in engine.seen:
        attention = attention_of(engine.model, layer, engine.traces, engine.kept)
        engine.seen[layer] = ([], 0) if attention is None else seen_in(attention)
    seen, count = engine.seen[layer]
    explains = seen and (sure or len(seen) == count)
    return (Fact("keys seen", sentence(seen, count)),) if explains else ()


def sentence(seen: Sequence[Seen], looked_at: int) -> str:
    """What those queries saw of which that could be told, of so many that were looked at."""
    law = next(_law(seen), None) if len(seen) > 1 else None
    count = f"the {looked_at}" if len(seen) == looked_at else f"{len(seen)} of the {looked_at}"
    if law is not None:
        return f"{count} tokens looked at from {seen[0].position} to {seen[-1].position} see {law}"
    some = "" if len(seen) == looked_at else f" ({count} that were looked at)"
    each = [f"position {one.position} {_one(one)}" for one in seen[:FEW]]
    return f"{'; '.join(each)}{' ...' if len(seen) > FEW else ''}{some}"


def _one(seen: Seen) -> str:
    """What one query saw."""
    if seen.zeros:
        return f"sees {_count(seen.zeros, 'row')} of zeros besides"
    if seen.page is not None:
        at, of, size = seen.page
        return f"sees the keys {of}-{of + size - 1} in place of {at}-{at + size - 1}"
    if not seen.adds and len(seen.lacks) < len(seen.right) / 2:
        return f"does not see {_keys(seen.lacks)}"
    if not seen.lacks:
        return f"sees {_keys(seen.adds)} besides"
    return f"sees {_keys(seen.keys)} alone"


def _keys(keys: Sequence[int]) -> str:
    """``key 63``, ``keys 0-43, 64``; every so many, where that is their order."""
    steps = {after - before for before, after in pairwise(keys)}
    if len(steps) == 1 and len(keys) > FEW and steps != {1}:
        return f"keys {keys[0]}, {keys[1]}, ..., {keys[-1]}"
    return f"key{'s' if len(keys) > 1 else ''} {in_words(keys, PARTS)}"


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}"


def _law(seen: Sequence[Seen]) -> Iterator[str]:
    """What holds of all of them, in words that follow "see"."""
    if any(each.zeros or each.page for each in seen):
        yield from _alike({(each.zeros, each.page[:2] if each.page else None) for each in seen})
        return
    runs = [
        (keys[0], keys[-1] + 1) if (keys := each.keys) and keys[-1] - keys[0] < len(keys) else None for each in seen
    ]
    if None not in runs:
        found = [run for run in runs if run is not None]
        yield from _from(seen, [start for start, _ in found]) if _own(seen, found) else _up_to(seen, found)
    yield from _sinks(seen)
    yield from _lacking(seen)


def _alike(found: set[tuple[int, tuple[int, int] | None]]) -> Iterator[str]:
    """As many rows of zeros, or a page in place of another, for all."""
    if len(found) == 1:
        zeros, page = found.pop()
        if page is not None:
            yield f"a page of keys from {page[1]} on in place of the one from {page[0]} on"
        elif zeros:
            yield f"{_count(zeros, 'row')} of zeros besides, with a score of zero"


def _own(seen: Sequence[Seen], runs: Sequence[tuple[int, int]]) -> bool:
    """Whether each sees a run of keys that ends with its own."""
    return all(stop == each.position + 1 for each, (_, stop) in zip(seen, runs, strict=True))


def _right(seen: Sequence[Seen]) -> str:
    """What they should see."""
    window = max(len(each.right) for each in seen)
    return f"the last {window} are right" if any(each.right.start for each in seen) else "all are right"


def _from(seen: Sequence[Seen], starts: Sequence[int]) -> Iterator[str]:
    """All keys from one on: the first, one that is as far back for all, one that is the same, or a chunk's first."""
    back = {each.position + 1 - start for each, start in zip(seen, starts, strict=True)}
    size = gcd(*starts)
    if not any(starts):
        yield f"all keys up to their own, where {_right(seen)}"
    elif len(back) == 1:
        yield f"the last {back.pop()} keys alone, their own included, where {_right(seen)}"
    elif len({*starts}) == 1:
        yield f"no key before key {starts[0]}, where {_right(seen)}"
    elif size > 1 and max(back) <= size:
        yield f"no key before the last multiple of {size}, where {_right(seen)}"


def _up_to(seen: Sequence[Seen], runs: Sequence[tuple[int, int]]) -> Iterator[str]:
    """The keys up to one: that is as far from its own for all, or the same, or where a token is in its chunk."""
    if any(start != each.right.start for each, (start, _) in zip(seen, runs, strict=True)):
        return
    stops = [stop for _, stop in runs]
    steps = [each.position + 1 - stop for each, stop in zip(seen, stops, strict=True)]
    size = gcd(*steps)
    if len({*steps}) == 1 and steps[0] < 0:
        yield f"the {'key' if steps[0] == -1 else f'{-steps[0]} keys'} behind their own too"
    elif len({*steps}) == 1:
        yield f"no key of the last {steps[0]}, their own included"
    elif len({*stops}) == 1:
        yield f"no key behind key {stops[0] - 1}"
    elif block := _whole_blocks(seen, stops):
        yield f"no key of the last block of {block}, which is not full"
    elif size > 1 and max(stops) <= size:
        yield f"keys only up to their place in a chunk of {size}: position {seen[0].position} up to key {stops[0] - 1}"


def _whole_blocks(seen: Sequence[Seen], stops: Sequence[int]) -> int:
    """The size of the blocks up to whose end each sees its keys; 0: they end otherwise."""
    sees = [*zip(seen, stops, strict=True)]
    fits = (size for size in PAGES if all(stop == (one.position + 1) // size * size for one, stop in sees))
    return next(fits, 0)


def _sinks(seen: Sequence[Seen]) -> Iterator[str]:
    """The first keys besides the last ones, as many for each."""
    ends = set[tuple[int, int]]()
    for each in seen:
        first = next((n for n, key in enumerate(each.keys) if key != n), 0)
        last = each.keys[first:]
        if not first or last != tuple(range(last[0], each.position + 1)):
            return
        ends.add((first, len(last)))
    if len(ends) == 1:
        first, count = ends.pop()
        yield f"the first {_count(first, 'key')} and the last {count} alone, where {_right(seen)}"


def _lacking(seen: Sequence[Seen]) -> Iterator[str]:
    """Keys that no later token sees."""
    every = sorted({key for each in seen for key in each.lacks})
    for own, words in ((0, ""), (1, ", which their own tokens alone see")):
        rights = (tuple(key for key in every if key in each.right and key <= each.position - own) for each in seen)
        if every and not any(each.adds for each in seen) and [each.lacks for each in seen] == [*rights]:
            yield f"all but {_keys(every)}{words}"
            return
