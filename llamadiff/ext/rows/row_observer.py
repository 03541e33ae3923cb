"""Runs a long prompt in llama.cpp and tells the taps of some tokens, and K and V of all; in its process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamadiff.ext.rows.choose import chosen
from llamadiff.llamacpp.observer import AT_ONCE, Observer
from llamadiff.llamacpp.passes import NoListener
from llamadiff.llamacpp.request import Say
from llamadiff.llamacpp.tensors import Tensor

OUT = ("inp_out_ids", "out_ids")  # llama.cpp's names of the rows that go on to the logits


class RowObserver(Observer):
    """A run of which ``request.rows`` are told. Only they have logits: so the last layer computes no others."""

    cut = 0  # rows of a tensor, once those without logits were left out; 0: all are there

    def _tokens_at_once(self) -> int:
        self.chosen = chosen(self.request.rows, self.total)
        self.everywhere = frozenset(self.request.everywhere)
        return AT_ONCE

    def run(self, say: Say) -> None:
        self.given = NoListener(self.feed)
        super().run(say)

    def _here(self) -> list[int]:
        """The chosen tokens of this pass."""
        return [row for row in self.chosen if self.start <= row < self.start + self.rows]

    def _with_logits(self, count: int) -> Sequence[int]:
        here = set(self._here())
        self.cut, self.own = 0, len(here)
        return [int(self.start + n in here) for n in range(count)]

    def _observe(self, pointer: Any, ask: bool, _: Any) -> bool:
        wanted = super()._observe(pointer, ask, _)
        if not ask:
            self._note_cut(self.ggml.node(pointer))
        return wanted

    def _ask(self, node: Tensor) -> bool:
        return self._leaves_out(node) or super()._ask(node)

    def _leaves_out(self, node: Tensor) -> bool:
        """Whether it takes the rows that have logits from the others."""
        return node.op == "GET_ROWS" and len(node.sources) > 1 and node.sources[1].name in OUT

    def _note_cut(self, node: Tensor) -> None:
        if self._leaves_out(node):
            self.cut = self.own

    def _is_wanted(self, name: str) -> bool:
        return (bool(self._here()) or name in self.everywhere) and super()._is_wanted(name)

    def _row_words(self, name: str) -> dict[str, Any]:
        return {"of": self.cut, "cut": True} if self.cut else {}
