"""Loads a model into llama.cpp, tokenizes, and tells its version; in the child process."""

from __future__ import annotations

import ctypes
import os
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from llama_cpp import llama_cpp

from llamadiff.llamacpp.library import set_fields
from llamadiff.llamacpp.request import Request
from llamadiff.llamacpp.tensors import Ggml
from llamadiff.system.errors import UnrunnableError, UserError

LOG_ERROR = 4  # GGML_LOG_LEVEL_ERROR
SMALL_MODEL = 64 << 20  # bytes: below, waking a second thread for every op costs more than it saves


class Quiet:
    """llama.cpp's log reduced to errors, which stay on standard error for the parent to quote."""

    def __enter__(self) -> None:
        def log(level: int, text: bytes, _: Any) -> None:
            if level == LOG_ERROR:
                os.write(2, b"error: " + text)

        self.callback = llama_cpp.llama_log_callback(log)  # kept: a collected callback is a segfault
        llama_cpp.llama_log_set(self.callback, ctypes.c_void_p(0))

    def __exit__(self, *_: object) -> None:
        return None


def load(request: Request) -> Any:
    """The model file in llama.cpp, with the request's settings. Raises UserError if llama.cpp cannot load it."""
    settings, params = request.settings, llama_cpp.llama_model_default_params()
    if settings.gpu_layers and not llama_cpp.llama_supports_gpu_offload():
        raise UserError(
            f"--gpu-layers {settings.gpu_layers}: this llama.cpp was built without a GPU backend, or finds no GPU; "
            "leave it out, or build llama-cpp-python for your GPU (CMAKE_ARGS=-DGGML_CUDA=on)"
        )
    set_fields(params, n_gpu_layers=settings.gpu_layers, use_extra_bufts=settings.repack)
    model = llama_cpp.llama_model_load_from_file(os.fsencode(request.model), params)
    if not model:
        raise UnrunnableError(f"{request.model}: llama.cpp cannot load the model")
    return model


def without_bos(model: Any, request: Request) -> Request:
    """The text without the beginning-of-text token that it was written with, where tokenizing adds one."""
    if request.text is None or not llama_cpp.llama_vocab_get_add_bos(llama_cpp.llama_model_get_vocab(model)):
        return request
    return replace(request, text=request.text.removeprefix(request.bos))


def tokenize(model: Any, request: Request) -> list[int]:
    """The request's text as token ids, in llama.cpp's own tokenizer."""
    assert request.text is not None
    vocabulary = llama_cpp.llama_model_get_vocab(model)
    if llama_cpp.llama_vocab_type(vocabulary) == 0:  # LLAMA_VOCAB_TYPE_NONE
        raise UserError(f"{request.model}: the file has no tokenizer; give token ids with --tokens 1,2,3")
    text = request.text.encode()
    room = len(text) + 16
    buffer = (llama_cpp.llama_token * room)()
    count = llama_cpp.llama_tokenize(vocabulary, text, len(text), buffer, room, True, True)
    if count <= 0:
        raise UserError(
            f"{request.model}: llama.cpp's tokenizer gave no tokens for the prompt (code {count}); "
            "give token ids with --tokens 1,2,3"
        )
    return list(buffer[:count])


def build_version() -> str:
    """llama-cpp-python's version and that of the ggml it was built with."""
    library = Ggml().lib
    parts = [f"llama-cpp-python {version('llama-cpp-python')}"]
    for name in ("ggml_version", "ggml_commit"):
        if hasattr(library, name):
            getattr(library, name).restype = ctypes.c_char_p
            parts.append(f"{name.removeprefix('ggml_')} {getattr(library, name)().decode()}")
    return ", ggml ".join(parts[:2]) + (f" ({parts[2]})" if len(parts) > 2 else "")


def build_flags() -> str:
    """llama.cpp's own line of compiled-in CPU features and backends."""
    return str(llama_cpp.llama_print_system_info().decode()).strip()
