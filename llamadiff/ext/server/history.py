"""What a server has kept of earlier requests: the same token ids again, in other orders, at once, with one more turn.

What it says of ids must not depend on what it was asked before, nor on what it is asked beside. Each probe states the
ids that its rows follow, and which prompts the server's cache may have held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from itertools import takewhile

from llamadiff.ext.server.answers import Next, Probe, Row
from llamadiff.ext.server.apis import Api
from llamadiff.system.errors import UserError
from llamadiff.system.progress import Progress

Ids = tuple[int, ...]
PROMPT, LEAST = 64, 6  # tokens of a prompt that is asked again: so many of a long one; a shorter one tells nothing
PREDICTED = 8  # tokens that the server goes on with
AGAIN = "again"
PREDICTS = f"with {PREDICTED} predicted tokens"
MORE = "with one more turn"
AFTER = "after another prompt that begins alike"
SHORTER = "out of order, a shorter prompt after a longer one"
AT_ONCE = "at once with other prompts"
HOWS = (PREDICTS, MORE, AGAIN, AFTER, SHORTER, AT_ONCE)


def prompts_of(tokens: Sequence[int]) -> tuple[Ids, Ids, Ids]:
    """A prompt, another one that begins with its first half, and one that shares its first token alone."""
    whole = tuple(tokens[:PROMPT])
    half = len(whole) // 2
    return whole, (*whole[:half], *_other(whole[half:])), (*whole[:1], *_other(whole[1:]))


def _other(ids: Ids) -> Ids:
    """The same ids in another order; as they are where all are one."""
    turned = (ids[each:] + ids[:each] for each in range(1, len(ids)))
    return next((each for each in (ids[::-1], *turned) if each[:1] != ids[:1]), ids)


def probe(
    api: Api, another: Callable[[], AbstractContextManager[Api]], tokens: Sequence[int], progress: Progress
) -> tuple[tuple[Probe, ...], str]:
    """All probes of a server, and why some are missing. ``another``: one more connection to it."""
    if len(tokens) < LEAST:
        return (), f"a prompt of {len(tokens)} tokens is too short"
    found: list[Probe] = []
    try:
        for each in _probes(api, another, tokens):
            progress(f"asking the server {each.how}")
            found.append(each)
    except UserError as error:
        return tuple(found), str(error)
    return tuple(found), ""


def _probes(api: Api, another: Callable[[], AbstractContextManager[Api]], tokens: Sequence[int]) -> Iterator[Probe]:
    whole, alike, other = prompts_of(tokens)
    rows, _ = api.after(whole, PREDICTED)
    known = [*takewhile(lambda row: row is not None, rows)]
    ids = [*takewhile(lambda token: token is not None, (row.chosen for row in known if row is not None))]
    predicted: Ids = tuple(token for token in ids if token is not None)
    longer = (*whole, *predicted)
    yield Probe(PREDICTS, longer, _numbered(known, len(whole), len(longer)))
    turn = (*longer[: len(whole) + PREDICTED // 2], *other[1:4])
    yield _one(api, MORE, turn, longer)
    yield _one(api, AGAIN, whole, turn)
    yield _one(api, AFTER, alike, whole)
    yield _one(api, SHORTER, whole[: len(whole) // 2 + 1], alike)
    asked = (whole, alike, other)

    def ask(ids: Ids) -> Probe:
        with another() as own:
            return _one(own, AT_ONCE, ids, *(each for each in asked if each != ids))

    with ThreadPoolExecutor(len(asked)) as threads:
        yield from threads.map(ask, asked)


def _one(api: Api, how: str, ids: Ids, *before: Ids) -> Probe:
    rows, _ = api.after(ids)
    return Probe(how, ids, _numbered(rows[:1], len(ids), len(ids)), before)


def _numbered(rows: Sequence[Next | None], first: int, last: int) -> dict[int, Row]:
    """Rows by how many tokens they follow."""
    return {first + n: row.row for n, row in enumerate(rows) if row is not None and first + n <= last}


def mixtures(probe: Probe, size: int) -> Iterator[tuple[str, Ids]]:
    """What a server may have had before its answer in place of the ids, in words: parts of what it was asked before."""
    ids = probe.tokens[:size]
    for before in probe.before:
        same = len([*takewhile(bool, (a == b for a, b in zip(before, ids, strict=False)))])
        for kept in range(same + 1, min(len(before), size - 1) + 1):
            yield (
                f"it keeps {kept} tokens of another prompt in its cache, of which {same} are this one's",
                (*before[:kept], *ids[kept:]),
            )
        yield f"another prompt of {len(before)} tokens stays before what follows token {same}", (*before, *ids[same:])
        yield "it answers as after another prompt", before
