"""Runs llama.cpp on one request and writes the trace, in the child process (child_main.py)."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from queue import Queue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.llamacpp.interface import Handle, Library, Room
from llamadiff.llamacpp.quantizing import q8_way
from llamadiff.llamacpp.request import LONG, SCORES, Request, Say, Settings
from llamadiff.llamacpp.session import SMALL_MODEL
from llamadiff.llamacpp.tap_names import tap_of
from llamadiff.llamacpp.tensors import Node
from llamadiff.numerics.types import NUMBERS
from llamadiff.system.errors import UserError
from llamadiff.system.hashing import is_remembered, model_sha256
from llamadiff.trace import taps
from llamadiff.trace.metadata import Info
from llamadiff.trace.writer import TraceWriter

Array = NDArray[Any]

WEIGHT_ENDINGS = (".weight", ".bias", ".scale", ".ssm_a", ".ssm_d")
AT_ONCE = 256  # tokens of a prompt that are run together: what llama.cpp holds of them grows with their number


class Capture:
    """One context with an eval callback that copies every wanted tap as it is computed."""

    at_once = AT_ONCE  # 0: all tokens of a batch are run together
    hear: Queue[str]  # what the parent says while this runs
    writer: Any

    def __init__(self, library: Library, model: Handle, request: Request, tokens: list[int]) -> None:
        self.library, self.model, self.request = library, model, request
        self.ggml, self.lib = library.ggml, library.lib
        self.tokens = tokens
        self.given = Info(tuple(tokens), (), request.n_prefill or len(tokens), batches=request.batches)
        self.total = len(tokens) + request.n_predict
        self.n_vocab = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(model))
        self.wanted = None if request.wanted is None else set(request.wanted)
        self.weights_read: set[str] = set()
        self.start = self.rows = 0
        self.contexts = list[Handle]()
        files = request.files or (request.model,)
        small = sum(map(os.path.getsize, files)) < SMALL_MODEL
        hashing = 0 if all(map(is_remembered, files)) else 1  # it takes a core, and ggml's threads do not share well
        self.threads = request.settings.threads or (1 if small else max(1, (os.cpu_count() or 1) - hashing))
        self.failure: BaseException | None = None
        self._check_sizes()
        self.sha256 = ThreadPoolExecutor(1).submit(model_sha256, files)  # while llama.cpp works

    def _check_sizes(self) -> None:
        limit = self.lib.llama_model_n_ctx_train(self.model)
        if self.request.first + self.total > limit:
            place = f" from position {self.request.first} on" if self.request.first else ""
            raise UserError(
                f"{self.request.model}: {self.total} tokens (with --n-predict){place} are more than the model's "
                f"context of {limit}; give fewer"
            )
        for token in self.tokens:
            if not 0 <= token < self.n_vocab:
                raise UserError(
                    f"{self.request.model}: token id {token} is out of range: the vocabulary has {self.n_vocab} "
                    f"entries, 0 to {self.n_vocab - 1}; give the model that these tokens are of"
                )

    def run(self, say: Say) -> None:
        """The batches that are asked for, then greedy decode steps of one token each; then complete the trace."""
        assert self.request.output is not None
        context = self._context()
        with TraceWriter(
            self.request.output, expected_taps=40 * (self.lib.llama_model_n_layer(self.model) + 1)
        ) as writer:
            self.writer = writer
            prefill_s = self._decode_all(context, say)
            self._attach(writer)
            writer.finish(self._info(prefill_s))

    def close(self) -> None:
        """Give the memory of its contexts back."""
        for context in self.contexts:
            self.lib.llama_free(context)

    def _attach(self, writer: TraceWriter) -> None:
        """What the trace holds beside taps: nothing."""

    def _decode_all(self, context: Handle, say: Say) -> float:
        """Prefill and decode steps -> seconds of the prefill."""
        started = time.perf_counter()
        prefill_s = 0.0
        for start, stop in pairwise(self.given.edges):
            for first, last in self._parts(start, stop):
                self._decode(context, self.tokens[first:last], first)
            prefill_s = time.perf_counter() - started if stop <= self.given.n_prefill else prefill_s
        for step in range(self.request.n_predict):
            say(phase=f"decode step {step + 1} of {self.request.n_predict}")
            self.tokens.append(self._greedy(context))
            self._decode(context, self.tokens[-1:], len(self.tokens) - 1)
        return prefill_s

    def _parts(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The tokens that are run together, of a batch: as many in each part, since kernels go by their number."""
        n = stop - start
        count = max(1, -(-n // self.at_once)) if self.at_once else 1
        return [*pairwise(start + n * part // count for part in range(count + 1))]

    def _context(self, settings: Settings | None = None) -> Handle:
        """A context; a model that keeps nothing between passes has to see all tokens of a batch at once."""
        context = self._made(settings or self.request.settings)
        self.remembers = bool(self.lib.llama_get_memory(context))
        if not self.remembers and self.at_once:
            self.at_once = 0
            return self._context(settings)
        self.n_ctx = int(self.lib.llama_n_ctx(context))
        return context

    def _made(self, settings: Settings) -> Handle:
        observe = self._observe if self.request.way.callback else None
        context = self.library.context(self.model, self._room(settings), observe)
        if not context:
            raise UserError(f"{self.request.model}: llama.cpp cannot make a context with these settings")
        self.contexts.append(context)
        return context

    def _room(self, settings: Settings) -> Room:
        edges = pairwise(self.given.edges) if self.at_once else [(0, len(self.tokens))]
        at_once = max(32, *(last - first for start, stop in edges for first, last in self._parts(start, stop)))
        k, v = (NUMBERS[kind.upper()] for kind in (settings.type_k, settings.type_v))
        return Room(
            max(256, self.total), at_once, at_once, 1, k, v,
            settings.flash_attn, self.threads, settings.on_device,
        )  # fmt: skip

    def _decode(self, context: Handle, tokens: list[int], start: int) -> None:
        self.start, self.rows = start, len(tokens)
        place = self.request.first + start
        code = self._batch(context, tokens, range(place, place + len(tokens)))
        if self.failure is not None:
            raise self.failure
        if code != 0:
            raise UserError(f"{self.request.model}: llama_decode failed with code {code}")

    def _batch(self, context: Handle, tokens: list[int], positions: range) -> int:
        return self.library.decode(context, tokens, positions, [0] * len(tokens))

    def _greedy(self, context: Handle) -> int:
        logits = np.ctypeslib.as_array(self.lib.llama_get_logits_ith(context, -1), (self.n_vocab,))
        return int(logits.argmax())

    def _observe(self, pointer: Any, ask: bool, _: Any) -> bool:
        """The eval callback: asked for every node before it runs, and called with those it wanted after."""
        try:
            node = self.ggml.node(pointer)
            name = tap_of(node, [_seen(source) for source in node.sources])
            wanted = name is not None and self._is_wanted(name)
            if ask:
                self._note_weights(node)
            elif wanted and name is not None:
                self._record(name, node)
            return wanted if ask else True
        except BaseException as error:  # must not reach C
            self.failure = error
            return False

    def _is_wanted(self, name: str) -> bool:
        if self.total > LONG and not self.request.scores and name.startswith(SCORES):
            return False
        return self.wanted is None or name in self.wanted

    def _note_weights(self, node: Node) -> None:
        self.weights_read.update(s.name for s in node.sources if s.op == "NONE" and s.name.endswith(WEIGHT_ENDINGS))

    def _record(self, name: str, node: Node) -> None:
        tap = taps.parse(name)
        assert tap is not None
        values = node.seen()
        if tap.kind.op == "SSM_SCAN":  # one row: what it puts out, shaped as what it takes in, then its states
            taken = node.sources[1].shape
            values = values.reshape(-1)[: int(np.prod(taken))].reshape(taken)
        values = self._own_rows(tap, values)
        if tap.causal:
            values = self._visible(tap, values[..., : self.total])
        shape = list(values.shape)
        shape[tap.row_axis] = self.total
        if tap.causal:
            shape[2] = self.total
        self.writer.add(name, values, tap.row_axis, tuple(shape), self.start)

    def _own_rows(self, tap: taps.Tap, values: Array) -> Array:
        """ggml's four axes as the tap's, of the rows that were asked for."""
        return in_axes(tap, values, self.rows)

    def _visible(self, tap: taps.Tap, values: Array) -> Array:
        """Raw scores of hidden keys are arbitrary and left out; probabilities are kept as they are.

        A model that keeps nothing between passes is an encoder: its queries see all keys.
        """
        if tap.kind.word != "kq" or not self.remembers:
            return values
        queries = np.arange(self.start, self.start + self.rows)[:, None]
        return np.where(np.arange(values.shape[2])[None, :] <= queries, values, np.float32(0))

    def _info(self, prefill_s: float) -> Info:
        """What there is to say at the end of a run."""
        begun = self._begun()
        producer = {**begun.producer, "weights_read": sorted(self.weights_read), "prefill_s": prefill_s}
        return replace(begun, producer=producer, model={**begun.model, "sha256": self.sha256.result()})

    def _begun(self) -> Info:
        """What there is to say when it begins."""
        settings, first, steps = self.request.settings, self.request.first, (1,) * self.request.n_predict
        return Info(
            tokens=tuple(self.tokens),
            positions=tuple(range(first, first + self.total)),
            n_prefill=self.given.n_prefill,
            batches=(*self.given.batches, *steps) if self.given.batches else (),
            prompt=self.request.text,
            producer={
                "name": "llama.cpp",
                "version": self.library.version(),
                "settings": {**settings.to_json(), **self._as_it_ran()},
                "build": self.library.flags(),
                **self.request.asked,
            },
            model=self.request.model_info,
        )

    def _as_it_ran(self) -> dict[str, Any]:
        return {"n_ctx": self.n_ctx, "threads": self.threads, "q8": q8_way(self.lib)}


def _seen(source: Node) -> Node:
    """What a node reads, following the GET_ROWS of rows whose logits are wanted to its source: all rows are wanted."""
    chosen = source.name.startswith("node_") and source.op == "GET_ROWS" and source.sources[1].name == "out_ids"
    return source.sources[0] if chosen else source


def in_axes(tap: taps.Tap, values: Array, rows: int) -> Array:
    """ggml's four axes [ne3, ne2, ne1, ne0] as the tap's."""
    if tap.row_axis == 1:
        return values.reshape(values.shape[-3:])
    return values.reshape((rows, -1) if len(tap.kind.axes) == 2 else (rows, -1, values.shape[-1]))
