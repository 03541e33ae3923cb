"""Runs a long prompt in llama.cpp and tells the taps of some tokens, and K and V of all; in its process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamadiff.ext.rows.choose import chosen
from llamadiff.llamacpp.observer import AT_ONCE, Observer
from llamadiff.llamacpp.passes import NoListener
from llamadiff.llamacpp.request import Say
from llamadiff.llamacpp.tensors import Tensor
from llamadiff.system.errors import UserError

# Tokens that are run at once where there are no more than so many; half of them where there are more than these, and so
# on: llama.cpp holds a score for each and each key.
MANY, LEAST = 8192, 16
OUT = ("inp_out_ids", "out_ids")  # llama.cpp's names of the rows that go on to the logits


class RowObserver(Observer):
    """A run of which ``request.rows`` are told. Only they have logits: so the last layer computes no others."""

    own: Sequence[int] = ()  # the chosen rows of this pass
    is_cut = False  # whether those without logits were left out by now

    def _tokens_at_once(self) -> int:
        self.chosen, self.everywhere = chosen(self.request.rows, self.total), frozenset(self.request.everywhere)
        if not self.chosen:
            said = f"none of them is in the prompt, which has {self.total} tokens"
            raise UserError(f"--rows {self.request.rows[:40]}: {said}, 0 to {self.total - 1}")
        return max(LEAST, AT_ONCE >> max(0, (self.total - 1).bit_length() - MANY.bit_length() + 1))

    def run(self, say: Say) -> None:
        self.given = NoListener(self.feed)
        super().run(say)

    def _with_logits(self, count: int) -> Sequence[int]:
        here = {row - self.start for row in self.chosen}
        self.own, self.is_cut = [row for row in range(count) if row in here], False
        return [int(row in here) for row in range(count)]

    def _ask(self, node: Tensor) -> bool:
        return self._leaves_out(node) or super()._ask(node)

    def _leaves_out(self, node: Tensor) -> bool:
        """Whether it takes the rows that have logits from the others."""
        return node.op == "GET_ROWS" and len(node.sources) > 1 and node.sources[1].name in OUT

    def _is_wanted(self, name: str) -> bool:
        return (bool(self.own) or name in self.everywhere) and super()._is_wanted(name)

    def _observe_done(self, node: Tensor) -> bool:
        self.is_cut |= self._leaves_out(node)
        name = self._tap_of(node)
        if name is not None and self._is_wanted(name):
            said, data, alone = node.to_dict(), node.data, self.is_cut
            if not alone and name not in self.everywhere:
                said, data, alone = _picked(said, data, self.rows, self.own)
            event = {"tap": name, "start": self.start, "rows": self.rows, "node": said, "alone": alone}
            self.feed.tap({**event, "of": len(self.own) if alone else self.rows}, data)
        return True


def _picked(said: dict[str, Any], data: Any, rows: int, own: Sequence[int]) -> tuple[dict[str, Any], Any, bool]:
    """A tensor's chosen rows alone, where its rows lie one after the other; else all. Whether they are alone."""
    sizes, steps = said["ne"], said["nb"]
    axis = max((axis for axis, size in enumerate(sizes) if size > 1), default=0)
    if sizes[axis] != rows or steps[axis] * rows != len(data):
        return said, data, False
    step = steps[axis]
    some = b"".join(data[row * step : (row + 1) * step] for row in own)
    return {**said, "ne": [*sizes[:axis], len(own), *sizes[axis + 1 :]]}, some, True
