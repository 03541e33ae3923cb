"""How long a search goes on: by what it computes, so that a busy machine finds what an idle one does."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from math import prod

from llamadiff.ext.graph.graph import Graph, GraphNode
from llamadiff.ext.graph.ops.recurrent import RECURRENT

ONE = 1e6  # multiply-adds in the time that it takes to begin a node, however small
CONFIRMING, CONFIRMING_SECONDS = 2e10, 5.0  # multiply-adds, or seconds, after a search, for what it found
STATE = 64.0  # times as long as another value one takes that a state of so many is read for
VALUE = 8.0  # multiply-adds in the time that a value takes of an op that is no product


@dataclass
class Budget:
    """What is left to be computed, in multiply-adds; or ``until`` a time (time.perf_counter) that a user gave.

    What is spent of one ``within`` another is spent of that too.
    """

    left: float
    until: float = math.inf
    within: Budget | None = None

    @classmethod
    def of_seconds(cls, seconds: float) -> Budget:
        """As much as a machine can in the time that somebody gave."""
        return cls(math.inf, time.perf_counter() + seconds)

    @property
    def is_spent(self) -> bool:
        return self.left <= 0 or time.perf_counter() > self.until

    def beyond(self) -> Budget:
        """This one, and a little more, to confirm what was found."""
        return Budget(self.left + CONFIRMING, self.until + CONFIRMING_SECONDS, self)

    def spend(self, node: GraphNode, graph: Graph, values: int) -> None:
        """A node was computed: so many values."""
        self._take(ONE + values * _of_each(node, graph))

    def _take(self, work: float) -> None:
        self.left -= work
        if self.within is not None:
            self.within._take(work)


def _of_each(node: GraphNode, graph: Graph) -> float:
    """The multiply-adds of each value of a node."""
    if node.op in RECURRENT:
        return VALUE * STATE
    if not node.op.startswith(("MUL_MAT", "FLASH_ATTN")) or node.sources[0] is None:
        return VALUE
    number = node.sources[0]
    first = graph.by_number[number].shape if number in graph.by_number else graph.leaves[number].shape
    inner = first[-1] if node.op.startswith("MUL_MAT") else prod(first[-2:])
    return VALUE + float(inner)
