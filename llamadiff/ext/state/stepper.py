"""Carries out the steps of a way in llama.cpp: a run's tokens are some of many, in contexts that others use too."""

from __future__ import annotations

import array
import os
from typing import Any

from llamadiff.ext.state.memory import Memory
from llamadiff.ext.state.split import taken
from llamadiff.llamacpp.interface import Handle, Room
from llamadiff.llamacpp.observer import TAPS, Observer
from llamadiff.llamacpp.request import Say
from llamadiff.llamacpp.steps import CLEAR, DECODE, IN_F16, IN_F32, LOAD, NEW, SET, SHIFT, Step
from llamadiff.llamacpp.tap_names import tap_of
from llamadiff.llamacpp.tensors import Tensor
from llamadiff.system.errors import UserError
from llamadiff.trace.taps import layer_of

TOKENS = "inp_tokens"  # llama.cpp's name of what a pass begins with
NO_REUSE = "LLAMA_GRAPH_REUSE_DISABLE"  # in the environment
RAW = "kq-"  # scores of rows that nobody sees, too, some of which are in no cell any more: they are not told
SEEN = "kq_soft_max-"
MOVES = (SET, LOAD, SHIFT)  # after which the rows that are seen are others than those that were recorded
CACHES = {IN_F32: "F32", IN_F16: "F16"}
MINUS_INFINITY = float("-inf")


class Stepper(Observer):
    """A run in steps."""

    step: Step
    memory: Memory
    pending: tuple[int, ...] = ()  # places of the batch that are still to be run
    own: tuple[int, ...] = ()  # rows of this pass that are recorded
    many = 0  # rows of this pass

    def run(self, say: Say) -> None:
        self._tell(TAPS)
        self.cells: dict[str, dict[int, int]] = {}  # of a cache: row of the trace -> cell
        self.caches: dict[int, str] = {}  # layer -> the cache that its scores are of
        os.environ[NO_REUSE] = "0" if self.request.way.reused else "1"
        for number, step in enumerate(self.request.way.steps):
            self.feed.send({"step": number})
            if step.call == NEW:
                self._renew(step)
            elif step.call == DECODE:
                self._decode_step(step)
            else:
                self.memory.perform(step)
            if step.call in (NEW, CLEAR, *MOVES):
                self.cells.clear()  # where rows are then is told by the next mask
        self.feed.send({"ended": {"tokens": self.tokens, "weights_read": sorted(self.weights_read)}})

    def _renew(self, step: Step) -> None:
        """A context in place of the one before."""
        self.close()
        self.contexts.clear()
        self.given.begin()
        self.room = step.of
        context = self._make_context(self.request.settings)
        self.remembers = bool(self.lib.llama_get_memory(context))
        self.n_ctx = int(self.lib.llama_n_ctx(context))
        self.memory = Memory(self.library, context, self.memory.kept if hasattr(self, "memory") else {})

    def _room(self, settings: Any) -> Room:
        cells, many, ubatch, *cache = self.room
        batch = max(32, *(len(step.tokens) for step in self.request.way.steps))
        own = CACHES.get(sum(cache))
        k, v = (self.library.ggml.number(own or kind) for kind in (settings.type_k, settings.type_v))
        flash = settings.flash_attn and own is None  # it rounds both to float16
        way = self.request.way
        return Room(
            cells, batch, ubatch or batch, many, k, v, flash, self.threads, settings.on_device,
            rope_base=way.rope_base, rope_scale=way.rope_scale,
        )  # fmt: skip

    def _decode_step(self, step: Step) -> None:
        context: Handle = self.contexts[-1]
        self.step, self.pending, self.opening = step, tuple(range(len(step.tokens))), None
        self.start, self.rows, self.own = step.row, 0, ()
        self._begin()
        self._run_batch(context, step.tokens, step.positions, step.sequences)
        if not self.request.way.callback or self.wanted == set():
            self.start = step.row
            self._tell_logits(context, step.places or range(len(step.tokens)))
        self.feed.tell()

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def _note_pass(self, node: Tensor) -> None:
        """Where a pass over the graph begins: which of the batch's tokens it is of; and where rows are in a cache."""
        given = next((source for source in node.sources if source.name == TOKENS), None)
        if given is not None and self.opening in (None, (node.name, node.op)):
            self.opening = node.name, node.op
            self._begin_pass(given)
        elif node.op == "SET_ROWS" and node.base is not None and node.base.name.startswith("cache_k"):
            self._note_rows(node.base.name, array.array("q", bytes(node.sources[1].data)))
        elif node.op in ("MUL_MAT", "SOFT_MAX"):
            self._note_scores(node, tap_of(node) or "")

    def _begin_pass(self, given: Tensor) -> None:
        step = self.step
        found = taken(step, self.pending, array.array("i", bytes(given.data)))
        if found is None:
            raise UserError(f"{self.request.model}: llama.cpp runs other tokens than those of {step.words()}")
        self.pending = tuple(place for place in self.pending if place not in found)
        self.given.begin()
        owned, self.many = step.places, len(found)
        self.own = tuple(row for row, place in enumerate(found) if place in owned)
        self.start = step.row + (owned.index(found[self.own[0]]) if self.own else 0)
        self.rows = len(self.own)
        self.feed.send({"pass": [self.start, self.rows], "run": found})

    def _note_scores(self, node: Tensor, name: str) -> None:
        """Whose cache the scores of a layer are of; and what its mask tells."""
        keys, layer = node.sources[0].base, layer_of(name) or 0
        if name.startswith(RAW) and keys is not None:
            self.caches[layer] = keys.name
        elif name.startswith(SEEN) and len(node.sources) > 1 and layer in self.caches:
            self._find_rows(self.caches[layer], node.sources[1])

    def _note_rows(self, cache: str, cells: array.array[int]) -> None:
        """Rows of this pass are written to a cache."""
        held, written = self.cells.setdefault(cache, {}), set(cells)
        for row in [row for row, cell in held.items() if cell in written]:
            del held[row]
        held.update((self.start + number, cells[row]) for number, row in enumerate(self.own))

    def _find_rows(self, cache: str, mask: Tensor) -> None:
        """Where rows are that a state brought back: in the cells that are seen, and that nothing else is known of."""
        held, end = self.cells.setdefault(cache, {}), self.start + self.rows
        lost = [row for row in range(end) if row not in held] if self.own else []
        if lost:
            width = mask.shape[-1]
            values = array.array("f", bytes(mask.data))[self.own[0] * width : (self.own[0] + 1) * width]
            known = set(held.values())
            seen = [cell for cell, value in enumerate(values) if value != MINUS_INFINITY and cell not in known]
            held.update(zip(lost[len(lost) - len(seen) :], seen, strict=True))

    def _is_wanted(self, name: str) -> bool:
        return bool(self.own) and not name.startswith(RAW) and super()._is_wanted(name)

    def _row_words(self, name: str) -> dict[str, Any]:
        held = self.cells.get(self.caches.get(layer_of(name) or 0, ""), {}) if name.startswith((RAW, SEEN)) else {}
        return {"places": self.own, "of": self.many, "cells": [*held.items()]}
