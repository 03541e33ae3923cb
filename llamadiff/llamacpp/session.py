"""Loads a model into llama.cpp and tokenizes, in the child process."""

from __future__ import annotations

import ctypes
import os
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any

from llamadiff.llamacpp.interface import LOG, Handle, Library, Loading, Observe, Room
from llamadiff.llamacpp.layout import Address
from llamadiff.llamacpp.request import Request
from llamadiff.llamacpp.steps import SHIFT
from llamadiff.system.errors import UnrunnableError, UserError

ROTATION = "LLAMA_ATTN_ROT_DISABLE"  # in the environment
ASKED = os.environ.get(ROTATION)  # before anything is set
LOG_ERROR = 4  # GGML_LOG_LEVEL_ERROR
SMALL_MODEL = 64 << 20  # bytes: below, waking a second thread for every op costs more than it saves


class Quiet:
    """llama.cpp's log reduced to errors, which stay on standard error for the parent to quote."""

    def __init__(self, library: Library) -> None:
        self.library = library

    def __enter__(self) -> None:
        def log(level: int, text: bytes, _: object) -> None:
            if level == LOG_ERROR and not self.library.is_tried:
                os.write(2, b"error: " + text)

        self.callback = LOG(log)  # kept: a collected callback is a segfault
        self.library.lib.llama_log_set(self.callback, None)

    def __exit__(self, *_: object) -> None:
        return None


class Loaded:
    """A model that is loaded before the request for it comes. Raises UserError if llama.cpp cannot load it."""

    def __init__(self, library: Library, request: Request) -> None:
        self.library, self.request = library, request
        with Quiet(library):
            self._model: Handle | None = load(library, request)

    def taken_for(self, request: Request) -> Handle | None:
        """The model, if it is what a request asks for; else None, and it is gone."""
        model, self._model = self._model, None
        if model is None or (request.model, request.settings) == (self.request.model, self.request.settings):
            return model
        self.library.lib.llama_model_free(model)
        return None


def load(library: Library, request: Request) -> Handle:
    """The model file in llama.cpp, with the request's settings. Raises UserError if llama.cpp cannot load it."""
    library.lib.llama_backend_init()
    settings, loading = request.settings, Loading(repack=request.settings.repack)
    if settings.gpu_layers or settings.device or settings.split or settings.tensor_split:
        if not request.placing:
            raise UserError("device=, gpu_layers=: the slice that says where layers are is missing; leave them out")
        loading = resolve_name(request.placing)(library, request)
    model = library.load(os.fsencode(request.model), loading)
    if not model:
        raise UnrunnableError(f"{request.model}: llama.cpp cannot load the model")
    return model


def _rotation_setting(request: Request) -> str:
    """Whether a quantized cache is one as everybody knows it, not rotated ("1").

    Where nodes are judged, rotations may be some of them; and llama.cpp dies of a shift of such a cache that is not.
    """
    if request.way.rotated:
        return "0"
    if any(step.call == SHIFT for step in request.way.steps):
        return ASKED or "0"
    return (ASKED or "1") if request.nodes else "1"


def made_context(
    library: Library, model: Handle, request: Request, room: Room, observe: Observe | None = None
) -> Handle:
    """A context of a request's model. Raises UserError if llama.cpp refuses it."""
    os.environ[ROTATION] = _rotation_setting(request)
    context = library.context(model, room, observe)
    if not context:
        raise UserError(f"{request.model}: llama.cpp cannot make a context with these settings")
    library.prepare(context)
    if request.settings.lora:
        resolve_name(request.adapter)(library, model, context, request.settings)
    return context


def ask_model(library: Any, name: str, model: Handle, kind: Any = ctypes.c_int32) -> int:
    """What a function of not every version says of a model; 0 where there is none, which the caller must know of."""
    function = getattr(library, name, None)
    if function is None:
        return 0
    function.restype, function.argtypes = kind, [Address]
    return int(function(model))


def without_bos(library: Library, model: Handle, request: Request) -> Request:
    """The text without the beginning-of-text token that it was written with, where tokenizing adds one."""
    lib = library.lib
    if request.text is None or not lib.llama_vocab_get_add_bos(lib.llama_model_get_vocab(model)):
        return request
    return replace(request, text=request.text.removeprefix(request.bos))


def tokenize(library: Library, model: Handle, request: Request) -> list[int]:
    """The request's text as token ids, in llama.cpp's own tokenizer."""
    assert request.text is not None
    vocabulary = library.lib.llama_model_get_vocab(model)
    if library.lib.llama_vocab_type(vocabulary) == 0:  # LLAMA_VOCAB_TYPE_NONE
        raise UserError(f"{request.model}: the file has no tokenizer; give token ids with --tokens 1,2,3")
    count, found = ids_of(library, model, request.text, special=True)
    if count <= 0:
        raise UserError(
            f"{request.model}: llama.cpp's tokenizer gave no tokens for the prompt (code {count}); "
            "give token ids with --tokens 1,2,3"
        )
    return found


def ids_of(library: Library, model: Handle, text: str, special: bool, parse: bool = True) -> tuple[int, list[int]]:
    """llama_tokenize's code, and the ids; ``special``: with what the model adds; ``parse``: special tokens in the text
    are taken for such."""
    data = text.encode("utf-8", "surrogateescape")
    room = len(data) + 16
    buffer = (ctypes.c_int32 * room)()
    count = int(library.lib.llama_tokenize(library.tokenizer(model), data, len(data), buffer, room, special, parse))
    return count, list(buffer[: max(count, 0)])


def piece_of(library: Library, model: Handle, token: int) -> bytes:
    """The bytes that a token stands for, special ones too."""
    size, vocabulary = 256, library.tokenizer(model)
    buffer = ctypes.create_string_buffer(size)
    count = int(library.lib.llama_token_to_piece(vocabulary, token, buffer, size, 0, True))
    if count < 0:  # what it needs
        buffer = ctypes.create_string_buffer(-count)
        count = int(library.lib.llama_token_to_piece(vocabulary, token, buffer, -count, 0, True))
    return buffer.raw[:count]
