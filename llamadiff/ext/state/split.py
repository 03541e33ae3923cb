"""Which tokens of a batch llama.cpp computes together: told from what it runs, since a memory has a say in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llamadiff.llamacpp.steps import Step


def taken(step: Step, pending: Sequence[int], tokens: Sequence[int]) -> tuple[int, ...] | None:
    """The places, among the ``pending`` ones of a batch, of the tokens that are run together, in their order.

    They are the next ones, or the next of several sequences, as many of each (llama-batch.cpp: split_simple,
    split_equal). None if llama.cpp runs anything else.
    """
    count = len(tokens)
    if [step.tokens[place] for place in pending[:count]] == [*tokens]:
        return tuple(pending[:count])
    queues: dict[int, list[int]] = {}
    for place in pending:
        queues.setdefault(step.sequences[place], []).append(place)
    return next((found for many in range(len(queues), 0, -1) if (found := _equal(step, queues, tokens, many))), None)


def _equal(step: Step, queues: Mapping[int, Sequence[int]], tokens: Sequence[int], many: int) -> tuple[int, ...] | None:
    """The places, if the tokens are those of so many sequences, one after the other, as many of each."""
    each, left, found = len(tokens) // many, dict(queues), list[int]()
    for start in range(0, len(tokens), max(1, each)):
        wanted = [*tokens[start : start + each]]
        fits = [key for key, queue in left.items() if [step.tokens[place] for place in queue[:each]] == wanted]
        if not fits:
            return None
        found += left.pop(fits[0])[:each]
    return tuple(found)
