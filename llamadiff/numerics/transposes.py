"""Which transpose makes one shape another."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations


def transpose_to(have: Sequence[int], want: Sequence[int]) -> str | None:
    """The transpose that makes a shape the wanted one, as numpy writes it; None if none does, or more than one."""
    if len(have) != len(want) or tuple(have) == tuple(want):
        return None
    orders = [order for order in permutations(range(len(have))) if [have[i] for i in order] == list(want)]
    return f"x.transpose({', '.join(map(str, orders[0]))})" if len(orders) == 1 else None


def advice(have: Sequence[int], want: Sequence[int]) -> str:
    """The end of a sentence that says so; empty if there is nothing to say."""
    transpose = transpose_to(have, want)
    return f"; {transpose} makes it so" if transpose else ""
