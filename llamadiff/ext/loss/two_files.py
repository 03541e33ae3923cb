"""Two files of one model side by side in the child process: how far apart their next tokens are, tensors restored.

A trial changes tensors of the other file in place: its ``ggml_tensor`` is pointed at the good file's values, or at
those quantized to a third type. llama.cpp then computes what it would of a file that holds them; none is written.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from llamadiff.llamacpp.blocks import TypeTraits, blocks_of
from llamadiff.llamacpp.interface import Handle, Library, Room
from llamadiff.llamacpp.layout import declare
from llamadiff.llamacpp.request import Request, Say
from llamadiff.llamacpp.session import SMALL_MODEL, Quiet, ids_of, load, made_context
from llamadiff.llamacpp.tensor_transport import Feed
from llamadiff.llamacpp.tensors import Tensor
from llamadiff.system.errors import UserError

OWN = ""  # in a trial: the good file's values in the good file's type
MOST_KEPT = 1 << 28  # bytes of the good file's logits that are kept while trials run
_CHANGED = ("type", "data", "buffer")  # and the strides


@dataclass(frozen=True)
class TextWindow:
    """Tokens that are run at once; of those from ``first`` to before ``last`` the next token is scored."""

    tokens: tuple[int, ...]
    targets: tuple[int | None, ...]
    first: int

    @property
    def size(self) -> int:
        """How many positions are scored."""
        return len(self.targets)


class TwoFiles:
    """Two loaded models with a context each, and the tensors of both by name."""

    def __init__(self, library: Library, request: Request) -> None:
        os.environ["LLAMA_GRAPH_REUSE_DISABLE"] = "1"  # a graph is built of the tensors as they are at that time
        self.library, self.request, self.lib = library, request, library.lib
        self.models = [load(library, replace(request, model=path)) for path in (request.model, request.other)]
        self.n_vocab = self._vocabulary_of_both()
        self.kept = list[Any]()  # the memory of what tensors were pointed at

    def _vocabulary_of_both(self) -> int:
        sizes = [self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(model)) for model in self.models]
        if sizes[0] != sizes[1]:
            raise UserError(
                f"{self.request.other}: its vocabulary has {sizes[1]} tokens, that of {self.request.model} {sizes[0]}; "
                "give two files of one model"
            )
        return int(sizes[0])

    def run(self, say: Say, feed: Feed) -> None:
        """The logits of all windows: of so many of the good file, and then of the other one in each trial."""
        trials = [json.loads(text) for text in self.request.texts]
        windows = self._windows()
        self.tensors = [self._tensors_of(model) for model in self.models]
        self.contexts = [self._context(model, max(len(window.tokens) for window in windows)) for model in self.models]
        done, total = 0, len(trials) * len(windows)
        for some in self._in_memory(windows):
            for window in some:
                feed.send({"base": window.targets, "n_vocab": self.n_vocab}, self._logits(0, window))
            for number, trial in enumerate(trials):
                say(phase=f"running llama.cpp on both files: {done} of {total}")
                with self._changed(trial):
                    for place, window in enumerate(some):
                        feed.send({"trial": number, "of": place}, self._logits(1, window))
                done += len(some)
            feed.send({"judged": len(some)})
        say(window=len(windows[0].tokens), windows=len(windows))

    def _windows(self) -> list[TextWindow]:
        """One of all tokens; or of a text as many as it has, of each of which the second half is scored."""
        vocabulary, request = self.lib.llama_model_get_vocab(self.models[0]), self.request
        tokens = list(request.tokens)
        if request.text is not None:
            if self.lib.llama_vocab_type(vocabulary) == 0:  # LLAMA_VOCAB_TYPE_NONE
                raise UserError(f"{request.model}: the file has no tokenizer; leave out --text")
            tokens = ids_of(self.library, self.models[0], request.text, special=True, parse=not request.window)[1]
        self._check(tokens)
        if not request.window:
            return [TextWindow(tuple(tokens), (*tokens[1:], None), 0)]
        size = min(request.window, len(tokens), int(self.lib.llama_model_n_ctx_train(self.models[0])))
        opening = self.lib.llama_vocab_bos(vocabulary) if self.lib.llama_vocab_get_add_bos(vocabulary) else None
        starts = list(range(0, len(tokens) - size + 1, size))[: request.most or None]
        return [_window(tokens[start : start + size], opening) for start in starts]

    def _check(self, tokens: Sequence[int]) -> None:
        where, limit = self.request.model, int(self.lib.llama_model_n_ctx_train(self.models[0]))
        least = 4 if self.request.window else 1
        if len(tokens) < least:
            raise UserError(f"{where}: the text has {len(tokens)} tokens; give one of {least} or more")
        if not self.request.window and len(tokens) > limit:
            raise UserError(f"{where}: {len(tokens)} tokens are more than the model's context of {limit}; give fewer")
        beyond = next((token for token in tokens if not 0 <= token < self.n_vocab), None)
        if beyond is not None:
            raise UserError(f"{where}: token id {beyond} is out of range: the vocabulary has {self.n_vocab} entries")

    def _in_memory(self, windows: Sequence[TextWindow]) -> Iterator[Sequence[TextWindow]]:
        """The windows, so many at a time that their logits have room."""
        step = max(1, MOST_KEPT // max(1, windows[0].size * self.n_vocab * 4))
        return (windows[at : at + step] for at in range(0, len(windows), step))

    def _context(self, model: Handle, n_tokens: int) -> Handle:
        return made_context(self.library, model, self.request, self._room(n_tokens))

    def _room(self, n_tokens: int) -> Room:
        settings, at_once = self.request.settings, max(32, n_tokens)
        files = (self.request.model, self.request.other)
        small = max(map(os.path.getsize, files)) < SMALL_MODEL
        threads = settings.threads or (1 if small else os.cpu_count() or 1)
        k, v = (self.library.ggml.number(kind) for kind in (settings.type_k, settings.type_v))
        return Room(max(256, n_tokens), at_once, at_once, 1, k, v, settings.flash_attn, threads)

    def _logits(self, side: int, window: TextWindow) -> bytes:
        """[position, vocabulary] of the scored positions, float32."""
        context, count = self.contexts[side], len(window.tokens)
        memory = self.lib.llama_get_memory(context)
        if memory:
            self.lib.llama_memory_clear(memory, True)
        code = self.library.decode(context, window.tokens, range(count), [0] * count, [1] * count)
        if code != 0:
            path = (self.request.model, self.request.other)[side]
            raise UserError(f"{path}: llama_decode failed with code {code}")
        first = self.lib.llama_get_logits_ith(context, 0)
        place = ctypes.addressof(first.contents) + 4 * window.first * self.n_vocab
        return ctypes.string_at(place, 4 * window.size * self.n_vocab)

    def _tensors_of(self, model: Handle) -> dict[str, list[Any]]:
        """Name -> the tensors of the file, as the graph of one token reads them; a tied head is a second one."""
        found = dict[str, dict[int, Any]]()

        def observe(pointer: Any, ask: bool, _: Any) -> bool:
            for source in self.library.ggml.node(pointer).walk():
                if source.op == "NONE" and source.tensor.data:
                    found.setdefault(source.name, {})[source.address] = source.tensor
            return False

        context = self.library.context(model, self._room(1), observe)
        if not context or self.library.decode(context, [0], [0], [0], [1]) != 0:
            raise UserError(f"{self.request.model}: llama.cpp cannot run one token of it")
        self.lib.llama_free(context)
        return {name: list(tensors.values()) for name, tensors in found.items()}

    @contextmanager
    def _changed(self, trial: Mapping[str, str]) -> Iterator[None]:
        """The other file's model with tensors of other values, for as long as this lasts."""
        before = [(tensor, _state(tensor)) for name in trial for tensor in self.tensors[1].get(name, ())]
        try:
            for name, kind in trial.items():
                for tensor in self.tensors[1].get(name, ()):
                    _put(tensor, self._values(name, kind))
            yield
        finally:
            for tensor, state in before:
                _put(tensor, state)
            self.kept.clear()

    def _values(self, name: str, kind: str) -> dict[str, Any]:
        """Where the good file's values of a tensor are, in its own type or in another one."""
        good = next(iter(self.tensors[0].get(name, ())), None)
        if good is None:
            raise UserError(f"{self.request.model}: llama.cpp does not read {name}, so that it cannot be restored")
        if kind == OWN:
            return _state(good)
        made = blocks_of(self.library, kind, _floats_of(self.library, Tensor(self.library.ggml, good)), good.ne[0])
        blocks = ctypes.create_string_buffer(bytes(made), len(made))
        self.kept.append(blocks)
        number = self.library.ggml.number(kind)
        strides = _strides(good, *self.library.ggml.blocks(number))
        return {"type": number, "data": ctypes.addressof(blocks), "buffer": good.buffer, "nb": strides}


def _window(tokens: Sequence[int], opening: int | None) -> TextWindow:
    """A piece of a text: it begins with the model's first token, and of its second half each next token is scored."""
    first = len(tokens) // 2
    run = tokens if opening is None else [opening, *tokens[1:]]
    return TextWindow(tuple(run), tuple(tokens[first + 1 :]), first)


def _state(tensor: Any) -> dict[str, Any]:
    """What says where a tensor's values are, and how."""
    return {**{name: getattr(tensor, name) for name in _CHANGED}, "nb": tuple(tensor.nb)}


def _put(tensor: Any, state: Mapping[str, Any]) -> None:
    for name in _CHANGED:
        setattr(tensor, name, state[name])
    tensor.nb[:] = state["nb"]


def _strides(tensor: Any, values: int, size: int) -> tuple[int, ...]:
    """A tensor's strides in another type, of so many values and bytes a block."""
    row = tensor.ne[0] // values * size
    return (size, row, row * tensor.ne[1], row * tensor.ne[1] * tensor.ne[2])


def run_pair(library: Library, request: Request, say: Say, feed: Feed) -> None:
    """Two files of one model, side by side: their logits, and those that each trial of ``texts`` comes to."""
    library.lib.llama_backend_init()
    with Quiet(library):
        TwoFiles(library, request).run(say, feed)


def _floats_of(library: Library, tensor: Tensor) -> bytes:
    """The values of a tensor of a file, float32, as ggml decodes them."""
    data = tensor.data
    if tensor.type == "f32":
        return bytes(data)
    declare(library.lib, {"ggml_get_type_traits": (ctypes.POINTER(TypeTraits), ctypes.c_int)}, "llama.cpp")
    traits = library.lib.ggml_get_type_traits
    per_block, size = library.ggml.blocks(tensor.tensor.type)
    count = len(data) // size * per_block
    stored, floats = ctypes.create_string_buffer(bytes(data), len(data)), (ctypes.c_float * count)()
    traits(tensor.tensor.type).contents.to_float(stored, floats, count)
    return bytes(floats)
