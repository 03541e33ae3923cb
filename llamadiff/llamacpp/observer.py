"""Runs llama.cpp on one request and tells what its graph is, and the values that are asked for; in its own process.

Nothing is judged here, and nothing computed: who reads it is on the other side (readers.py).
"""

from __future__ import annotations

import array
import ctypes
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import isnan
from pkgutil import resolve_name
from typing import Any

from llamadiff.llamacpp.interface import ABORT, Handle, Library, Room
from llamadiff.llamacpp.passes import Listener, NoListener
from llamadiff.llamacpp.request import LONG, PLAIN, SCORES, Request, Say, Settings
from llamadiff.llamacpp.session import SMALL_MODEL, ask_model, made_context
from llamadiff.llamacpp.tap_names import tap_of
from llamadiff.llamacpp.tensor_transport import Feed
from llamadiff.llamacpp.tensors import Tensor
from llamadiff.system.errors import UserError

WEIGHT_ENDINGS = (".weight", ".bias", ".scale", ".ssm_a", ".ssm_d", ".lora_a")
AT_ONCE = 256  # tokens of a prompt that are run together: what llama.cpp holds of them grows with their number
SMALL = 1 << 20  # bytes of memory that a view of it is checked by its values, not by its place alone
CALLED_OFF = 2  # llama_decode's code for a pass that its abort callback ended
LAST = "result_output"
WINDOW = "llama_model_n_swa"  # what says how far layers with a window see, in later versions
_LAID_OUT = {"VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE", "CONT"}  # ops that compute nothing
_CACHE = re.compile(r"cache_([kv])_l\d")
TAPS, NODES, GRAPH, PLACES, NOTHING = "taps", "nodes", "graph", "places", "nothing"  # what is told of a pass


class Observer:
    """A run of tokens in one context or several."""

    def __init__(self, library: Library, model: Handle, request: Request, tokens: list[int], feed: Feed) -> None:
        self.library, self.model, self.request, self.feed = library, model, request, feed
        self.ggml, self.lib = library.ggml, library.lib
        self.tokens = tokens
        n_prefill = request.n_prefill or len(tokens)
        steps = range(n_prefill, len(tokens) + 1)
        self.edges = (0, *accumulate(request.batches)) if request.batches else (0, *steps)
        self.n_prefill, self.total = n_prefill, len(tokens) + request.n_predict
        self.n_vocab = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(model))
        self.wanted = None if request.wanted is None else set(request.wanted)
        self.weights = frozenset(request.weights)
        self.at_once = self._tokens_at_once()
        self.start = self.rows = self.n_ctx = 0
        self.given: Listener = (resolve_name(request.listener) if request.listener else NoListener)(feed)
        self._tell(NOTHING)
        self.places: set[int] = set()
        self.place = -1
        self.known: set[int] = set()  # tensors of this pass that were told of
        self.opening: tuple[str, str] | None = None  # the node that a pass over the graph begins with
        self.passes: Iterator[tuple[int, int]] = iter(())
        self.weights_read: set[str] = set()
        self.contexts = list[Handle]()
        self.instead = dict[str, str]()  # settings that llama.cpp refused, as it has them
        self.kept = dict[str, set[int]]()  # "k", "v" -> the types that its caches were seen to have
        self.remembers = self.has_begun = self.is_seen = self.is_like_another = self.fuses = False
        small = sum(map(os.path.getsize, request.files or (request.model,))) < SMALL_MODEL
        spare = 0 if request.alone else 1  # ggml's threads do not share a core well
        self.threads = request.settings.threads or (1 if small else max(1, (os.cpu_count() or 1) - spare))
        self.failure: BaseException | None = None
        self._check_asked()

    def _tokens_at_once(self) -> int:
        """How many tokens of a batch are run together; 0: all."""
        request = self.request
        plain = request.way == PLAIN and not (request.nodes or request.graph or request.keep_graph)
        at_once = 2 * AT_ONCE if self.total <= 2 * AT_ONCE else AT_ONCE
        return at_once if plain else 0

    def _check_asked(self) -> None:
        request = self.request
        if request.way != PLAIN and (request.nodes or request.graph is not None or request.keep_graph):
            raise UserError(
                f"{request.model}: judged through llama.cpp's graph, and that is recorded in one go, with nobody "
                "beside; give settings alone"
            )
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

    # -- what is run ---------------------------------------------------------------------------------------------------

    def run(self, say: Say) -> None:
        """What the request asks for, then what there is to say at the end."""
        request = self.request
        plain = request.settings.in_float32
        if request.graph is not None and request.output is None:
            self._structure_alone()
        elif request.graph is not None:
            self._by_its_graph(say, plain)
        else:
            self._tell(NODES if request.nodes else TAPS)
            self._decode_all(self._context(), say)
            self._check_applied()
            if request.keep_graph:
                self._structure(plain)
        self.feed.send({"ended": {"tokens": self.tokens, "weights_read": sorted(self.weights_read)}})

    def _begin(self) -> None:
        """What there is to say of the run itself, once."""
        if self.has_begun:
            return
        self.has_begun = True
        self.feed.send({"began": {
            "tokens": self.tokens, "text": self.request.text, "n_layer": self.lib.llama_model_n_layer(self.model),
            "n_ctx": self.n_ctx,
            "threads": self.threads, "remembers": self.remembers,
            "window": ask_model(self.lib, WINDOW, self.model) if hasattr(self.lib, WINDOW) else None,
            "parts": self._parts(0, self.total), "version": self.library.version(), "build": self.library.flags(),
            **self.library.rounding(), **self.library.machine(), "instead": self.instead, "named": self.library.named,
        }})  # fmt: skip

    def _structure_alone(self) -> None:
        """The graph of all tokens in one go: nodes are seen before they run, and at the last it is called off."""
        self._tell(GRAPH, whole=True, until_last=True)
        context, called_off = self._context(), ABORT(lambda _: self.is_seen)
        self.lib.llama_set_abort_callback(context, called_off, None)
        self._decode(context, self.tokens, 0)

    def _structure(self, settings: Settings) -> None:
        """The graph of all tokens in one go, computed."""
        self.feed.send({"whole": True})
        self._tell(GRAPH, whole=True)
        self._decode(self._context(settings), self.tokens, 0)

    def _by_its_graph(self, say: Say, plain: Settings) -> None:
        """What the passes of the run are like; the graph, where that is another; then values, where they are asked for.

        Batches of a size are alike, but for the first.
        """
        settings, in_steps = self.request.settings, len(self.edges) > 2 or bool(self.request.n_predict)
        one = settings == plain and not in_steps
        self._tell(GRAPH, whole=one)
        self._decode_all(self._context(), say)
        if not one:
            self._structure(plain)
        self.feed.send({"asks": True})
        kinds = self.feed.await_word("places")  # of each kind of pass: which nodes
        self._tell(PLACES)
        context = self._context()
        for start, stop in pairwise([*self.edges, *range(self.edges[-1] + 1, self.total + 1)]):
            self.places = set(kinds[f"{start == 0:d} {stop - start}"])
            self._decode(context, self.tokens[start:stop], start)

    def _tell(self, what: str, whole: bool = False, until_last: bool = False) -> None:
        """From now on, tell this of passes: of a graph, the values of its leaves (``whole``); ``until_last``: and run
        nothing.
        """
        self.telling, self.whole, self.until_last = what, whole, until_last
        self.kinds = set[tuple[bool, int]]()  # of passes whose structure was told

    def close(self) -> None:
        """Give the memory of its contexts back."""
        for context in self.contexts:
            self.lib.llama_free(context)

    def _decode_all(self, context: Handle, say: Say) -> None:
        """Prefill and decode steps."""
        for start, stop in pairwise(self.edges):
            for first, last in self._parts(start, stop):
                self._decode(context, self.tokens[first:last], first)
        for step in range(self.request.n_predict):
            say(phase=f"decode step {step + 1} of {self.request.n_predict}")
            self.tokens.append(self._greedy(context))
            self._decode(context, self.tokens[-1:], len(self.tokens) - 1)

    def _parts(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The tokens that are run together, of a batch: as many in each part, since kernels go by their number."""
        n = stop - start
        count = max(1, -(-n // self.at_once)) if self.at_once else 1
        return [*pairwise(start + n * part // count for part in range(count + 1))]

    # -- contexts ------------------------------------------------------------------------------------------------------

    def _context(self, settings: Settings | None = None) -> Handle:
        """A context; a model that keeps nothing between passes has to see all tokens of a batch at once."""
        context = self._make_context(settings or self.request.settings)
        self.remembers = bool(self.lib.llama_get_memory(context))
        if not self.remembers and self.at_once:
            self.at_once = 0
            return self._context(settings)
        self.n_ctx = int(self.lib.llama_n_ctx(context))
        return context

    def _make_context(self, settings: Settings) -> Handle:
        observe = self._observe if self.request.way.callback else None
        self.asked_for = self._room(settings)
        self.library.is_tried = may_differ = settings == settings.in_float32 and self.request.way == PLAIN
        try:
            context = made_context(self.library, self.model, self.request, self.asked_for, observe)
        except UserError:
            if not may_differ:
                raise
            self.library.is_tried = False
            self.instead = {"type_v": "F16"}  # some forks keep V in float32 for flash attention alone
            self.asked_for = replace(self.asked_for, type_v=self.ggml.number("F16"))
            context = made_context(self.library, self.model, self.request, self.asked_for, observe)
        self.library.is_tried = False
        self.contexts.append(context)
        return context

    def _room(self, settings: Settings) -> Room:
        edges = pairwise(self.edges) if self.at_once else [(0, len(self.tokens))]
        at_once = max(32, *(last - first for start, stop in edges for first, last in self._parts(start, stop)))
        k, v = (self.ggml.number(kind) for kind in (settings.type_k, settings.type_v))
        way = self.request.way
        return Room(
            max(256, self.total), at_once, way.ubatch or at_once, 1, k, v, settings.flash_attn, self.threads,
            settings.on_device, self.request.pooled, way.rope_base, way.rope_scale,
        )  # fmt: skip

    # -- passes --------------------------------------------------------------------------------------------------------

    def _decode(self, context: Handle, tokens: list[int], start: int) -> None:
        self.start, self.rows, self.place, self.known = start, len(tokens), -1, set()
        self.opening, self.passes = None, self._pieces(start, len(tokens))
        self.given.begin()
        self.is_like_another = self.telling == GRAPH and (start == 0, len(tokens)) in self.kinds
        self.kinds.add((start == 0, len(tokens)))
        self._begin()
        self.feed.send({"pass": [start, len(tokens)]})
        place = self.request.first + start
        self._run_batch(context, tokens, range(place, place + len(tokens)), [0] * len(tokens))
        if not self.request.way.callback:
            self._tell_logits(context, range(len(tokens)))
        self.feed.tell()

    def _pieces(self, start: int, count: int) -> Iterator[tuple[int, int]]:
        """The first token of each pass over the graph, and how many tokens it has."""
        size = self.request.way.ubatch or count
        return ((start + at, min(size, count - at)) for at in range(0, count, size))

    def _run_batch(
        self, context: Handle, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int]
    ) -> None:
        """One call of llama_decode. Raises UserError if it fails, and what went wrong meanwhile."""
        self.running = context
        code = self.library.decode(context, tokens, positions, sequences, self._with_logits(len(tokens)))
        if self.failure is not None:
            raise self.failure
        if code != 0 and not (self.is_seen and code == CALLED_OFF):
            raise UserError(f"{self.request.model}: llama_decode failed with code {code}")

    def _with_logits(self, count: int) -> Sequence[int]:
        """Which tokens of a batch have logits (1): all."""
        return [1] * count

    def _greedy(self, context: Handle) -> int:
        """The first of the largest logits; of such as are no numbers, the first."""
        row = array.array("f", ctypes.string_at(self.lib.llama_get_logits_ith(context, -1), 4 * self.n_vocab))
        unclear = next((number for number, value in enumerate(row) if isnan(value)), None) if isnan(sum(row)) else None
        return row.index(max(row)) if unclear is None else unclear

    def _tell_logits(self, context: Handle, places: Sequence[int]) -> None:
        """Those of a pass that nobody looked at."""
        rows = [ctypes.string_at(self.lib.llama_get_logits_ith(context, place), 4 * self.n_vocab) for place in places]
        self.feed.send({"logits": [len(rows), self.n_vocab], "start": self.start}, b"".join(rows))

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def _observe(self, pointer: Any, ask: bool, _: Any) -> bool:
        """The eval callback: asked for every node before it runs, and called with those it wanted after."""
        if self.telling == NOTHING or self.is_like_another or self.library.is_unseen:
            return False
        try:
            node = self.ggml.node(pointer)
            if not self.ggml.is_computed(node):
                return False
            if ask:
                if self.request.settings.on_device:
                    self.lib.llama_synchronize(self.running)  # what comes from another device may be on its way
                self._note_pass(node)
                weights = (each.name for each in node.sources if each.op == "NONE")
                self.weights_read.update(name for name in weights if name.endswith(WEIGHT_ENDINGS))
                self._note_caches(node)
                if self.telling in (TAPS, NODES):
                    self.given.tell(node, self.start, self.rows)
            return self._ask(node) if ask else self._observe_done(node)
        except BaseException as error:  # must not reach C
            self.failure = error
            return False

    def _tap_of(self, node: Tensor) -> str | None:
        """The tap that a node is; none for scores that have the attention scale where the engine's have it not."""
        name, scales = tap_of(node, [_source_of(source) for source in node.sources]), self.request.scales_queries
        if scales is None or not (name or "").startswith("kq-"):
            return name
        queries = node.sources[1]
        while queries.op in _LAID_OUT:
            queries = queries.sources[0]
        return name if scales == (queries.op == "SCALE") else None

    def _ask(self, node: Tensor) -> bool:
        """Whether its value is wanted; what it is, and what it reads, is told before it runs."""
        self.place += 1
        if self.library.is_unread(node):
            return False
        if self.telling == TAPS:
            name = self._tap_of(node)
            alone = self.request.settings.on_device  # no kernel of several nodes runs where any of them is looked at
            return alone or (name is not None and self._is_wanted(name))
        if self.telling == PLACES:
            return self.place in self.places
        self._tell_node(node)
        if self.telling == NODES:
            return True
        self.is_seen = self.until_last and (self.is_seen or node.name == LAST)
        return self.whole and not self.until_last  # values are looked at one by one, a structure is not

    def _observe_done(self, node: Tensor) -> bool:
        """A node has run."""
        if self.telling == TAPS:
            name = self._tap_of(node)
            if name is not None and self._is_wanted(name):
                event = {"tap": name, "start": self.start, "rows": self.rows, "node": node.to_dict(),
                         **self._row_words(name)}  # fmt: skip
                if node.op == "SSM_SCAN":  # one row: what it puts out, shaped as what it takes in, then its states
                    event["taken"] = node.sources[1].shape
                self.feed.tap(event, node.data)
        elif self.telling == PLACES and self.place in self.places:
            self.feed.send(
                {"value": self.place, "start": self.start, "rows": self.rows, "node": node.to_dict()}, node.data
            )
        elif self.telling == NODES:
            values = [] if self.request.only_list else [node.data]
            self.feed.send({"computed": True, "looks": node.said_in_full()["looks"]}, *values)
        return True

    def _row_words(self, name: str) -> dict[str, Any]:
        """What else there is to say of a tap: where its rows are."""
        return {}

    def _tell_node(self, node: Tensor) -> None:
        """A node and what it reads, each tensor once, and bytes of those that are read, in their order."""
        tensors = [*node.sources, *([node.base] if node.base is not None else [])]
        once = {tensor.address: tensor for tensor in tensors}
        some = {tensor.address: tensor for tensor in tensors if self._is_read(node, tensor)}
        self.known.update(tensor.address for tensor in (node, *tensors))
        self.feed.send(
            {
                "node": {**node.said_in_full(), "tap": tap_of(node)},
                "tensors": [tensor.to_dict() for tensor in once.values()],
                "read": [*some],
            },
            *(tensor.data for tensor in some.values()),
        )

    def _is_read(self, node: Tensor, tensor: Tensor) -> bool:
        """Whether a tensor's values are told: of a graph, those of leaves that come up for the first time; of a node,
        those of what is no weight of the file; of a small memory, if the node is a view of it.
        """
        if self.telling == GRAPH:
            return self.whole and tensor.address not in self.known and tensor.name not in self.weights
        if self.request.only_list or node.op == "NONE":
            return False
        if node.op == "VIEW":
            return node.base is not None and tensor.address == node.base.address and tensor.memory <= SMALL
        is_source = any(tensor.address == source.address for source in node.sources)
        return is_source and not (tensor.op == "NONE" and tensor.name in self.weights)

    def _note_pass(self, node: Tensor) -> None:
        """Where a pass over the graph begins, go on to its tokens."""
        if self.opening is None or (self.request.way.ubatch and (node.name, node.op) == self.opening):
            self.opening = node.name, node.op
            found = next(self.passes, None)
            if found is None:
                raise UserError(f"{self.request.model}: llama.cpp cut the batch up otherwise than ubatch says")
            self.start, self.rows = found

    def _is_wanted(self, name: str) -> bool:
        if self.total > LONG and not self.request.scores and name.startswith(SCORES):
            return False
        return self.wanted is None or name in self.wanted

    def _note_caches(self, node: Tensor) -> None:
        """What a cache is really kept in, and whether attention is one op."""
        if node.op == "FLASH_ATTN_EXT":
            self.fuses = True
        base = node.base
        match = _CACHE.match(base.name) if base is not None else None
        if base is not None and match is not None:
            self.kept.setdefault(match[1], set()).add(base.tensor.type)

    def _check_applied(self) -> None:
        """Raise UserError where llama.cpp did not apply a setting that taps are judged by."""
        if self.telling != TAPS or self.request.way.steps:
            return
        said = "this llama.cpp does not apply it"
        for side, kind in (("k", self.asked_for.type_k), ("v", self.asked_for.type_v)):
            kept = self.kept.get(side, {kind})
            if kind not in kept:
                asked, found = (self.ggml.type_name(each) for each in (kind, min(kept)))
                raise UserError(
                    f"type_{side}={asked}: {said}, and keeps {side.upper()} in {found}; give type_{side}={found}, or "
                    "llamadiff backend, which judges its nodes as they are"
                )
        if self.fuses and not self.asked_for.flash_attn:
            raise UserError(
                f"flash_attn=off: {said}; give flash_attn=on, or llamadiff backend, which judges its nodes as they are"
            )


def _source_of(source: Tensor) -> Tensor:
    """What a node reads, following the GET_ROWS of rows whose logits are wanted to its source: all rows are wanted."""
    chosen = source.name.startswith("node_") and source.op == "GET_ROWS" and source.sources[1].name == "out_ids"
    return source.sources[0] if chosen else source
