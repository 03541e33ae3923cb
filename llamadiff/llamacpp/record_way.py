"""Records a run whose tokens go through the context in another way, as the taps that the plain run has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from llamadiff.llamacpp.interface import Handle, Room
from llamadiff.llamacpp.record_taps import Array, Capture, in_axes
from llamadiff.llamacpp.request import Settings
from llamadiff.system.errors import UserError
from llamadiff.trace import taps


class WayRun(Capture):
    """One context, and tokens in it that are cut up, beside others, after others, or unseen."""

    at_once = 0
    resting = False  # what runs now is not recorded
    opening: tuple[str, str] | None = None  # the node that a pass over the graph begins with

    def _room(self, settings: Settings) -> Room:
        room, way = super()._room(settings), self.request.way
        return replace(
            room, n_ctx=room.n_ctx * way.sequences, n_batch=room.n_batch * way.sequences,
            n_ubatch=way.ubatch or room.n_ubatch * way.sequences, n_seq=way.sequences,
        )  # fmt: skip

    def _context(self, settings: Settings | None = None) -> Handle:
        context = super()._context(settings)
        if self.request.way.used and self.remembers:
            self._use(context)
        return context

    def _use(self, context: Handle) -> None:
        """Run the tokens in the opposite order, and let the context forget them; what they left in memory stays."""
        self.resting = True
        super()._batch(context, self.tokens[::-1], range(len(self.tokens)))
        self.lib.llama_memory_clear(self.lib.llama_get_memory(context), False)
        self.resting = False

    def _decode(self, context: Handle, tokens: list[int], start: int) -> None:
        self.opening, self.passes = None, self._pieces(start, len(tokens))
        super()._decode(context, tokens, start)
        if not self.request.way.callback:
            self._add_logits(context)

    def _pieces(self, start: int, count: int) -> Iterator[tuple[int, int]]:
        """The first token of each pass over the graph, and how many tokens it has."""
        size = self.request.way.ubatch or count
        return ((start + at, min(size, count - at)) for at in range(0, count, size))

    def _batch(self, context: Handle, tokens: list[int], positions: range) -> int:
        """The tokens as the second of several sequences; the others have them in the opposite order."""
        others, many = tokens[::-1], self.request.way.sequences
        own = min(1, many - 1)
        given = [token for number in range(many) for token in (tokens if number == own else others)]
        sequences = [number for number in range(many) for _ in tokens]
        return self.library.decode(context, given, [*positions] * many, sequences)

    def _observe(self, pointer: Any, ask: bool, data: Any) -> bool:
        if self.resting:
            return False
        try:
            if ask:
                self._note_pass(pointer)
        except BaseException as error:  # must not reach C
            self.failure = error
            return False
        return super()._observe(pointer, ask, data)

    def _note_pass(self, pointer: Any) -> None:
        """Where a pass begins, go on to its tokens."""
        node = self.ggml.node(pointer)
        if self.opening is None or (self.request.way.ubatch and (node.name, node.op) == self.opening):
            self.opening = node.name, node.op
            found = next(self.passes, None)
            if found is None:
                raise UserError(f"{self.request.model}: llama.cpp cut the batch up otherwise than ubatch says")
            self.start, self.rows = found

    def _own_rows(self, tap: taps.Tap, values: Array) -> Array:
        many = self.request.way.sequences
        if many == 1:
            return super()._own_rows(tap, values)
        own = slice(self.rows, 2 * self.rows)  # those of the second sequence
        values = in_axes(tap, values, self.rows * many).take(np.arange(own.start, own.stop), tap.row_axis)
        return values[..., own] if tap.causal else values

    def _add_logits(self, context: Handle) -> None:
        tap = taps.parse(taps.LOGITS)
        assert tap is not None
        address = self.lib.llama_get_logits_ith
        first = self.rows if self.request.way.sequences > 1 else 0
        rows = [np.ctypeslib.as_array(address(context, first + i), (self.n_vocab,)).copy() for i in range(self.rows)]
        self.writer.add(taps.LOGITS, np.stack(rows), tap.row_axis, (self.total, self.n_vocab), self.start)
