"""Runs tokens in llama.cpp again and again, with nobody looking at some of the nodes; in its process."""

from __future__ import annotations

from collections.abc import Sequence

from llamadiff.llamacpp.observer import NODES, PLACES, Observer
from llamadiff.llamacpp.request import Say
from llamadiff.llamacpp.tensors import Tensor


class FusedObserver(Observer):
    """Every node as it runs alone; then passes as they are asked for, each with an empty memory.

    Of a pass some ranges of nodes are ``hidden``: their values are not asked for, and llama.cpp may run them together
    with what comes after. Values of others are reported, and of some hidden ones what is ``left`` in their memory when
    the next node that is looked at has run; or of one node what it reads, too.
    """

    hidden: Sequence[Sequence[int]] = ()
    left: Sequence[int] = ()
    only: int | None = None  # of a pass that tells of nodes: the only one

    def run(self, say: Say) -> None:
        self._tell(NODES)
        context = self._context()
        self._decode(context, self.tokens, 0)
        count = 0
        while True:
            self.feed.send({"asks": True})
            asked = self.feed.await_word("fused")
            if not asked:
                break
            count += 1
            say(phase=f"run {count} with nodes that nobody looks at")
            self.hidden, self.places, self.only = asked["hidden"], set(asked["reported"]), asked["only"]
            self.left, self._waiting = asked["left"], dict[int, Tensor]()
            self._tell(PLACES if self.only is None else NODES)
            if self.remembers:
                self.lib.llama_memory_clear(self.lib.llama_get_memory(context), True)
            self._decode(context, self.tokens, 0)
        self.feed.send({"ended": {"tokens": self.tokens, "weights_read": sorted(self.weights_read)}})

    def _ask(self, node: Tensor) -> bool:
        if self.telling == PLACES:
            self.place += 1
            if self.place in self.left:
                self._waiting[self.place] = node
            return not any(first <= self.place <= last for first, last in self.hidden)
        if self.only in (None, self.place + 1):
            return super()._ask(node)
        self.place += 1
        return True

    def _observe_done(self, node: Tensor) -> bool:
        if self.telling == NODES and self.only not in (None, self.place):
            return True
        while self.telling == PLACES and self._waiting:
            place, left = self._waiting.popitem()
            self.feed.send({"value": place, "start": self.start, "rows": self.rows, "node": left.to_dict()}, left.data)
        return super()._observe_done(node)
