"""What llama.cpp is asked besides runs, in its child process: does it load, how does it tokenize, how does it quantize.

``load`` and ``tokenize`` are about a request's model; ``quantize`` about float32 values in the file ``output``, rows of
types that ``texts`` name (``Q4_K 8 2048``: eight rows of 2048), which blocks then replace.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp import llama_cpp
from llamaref.weights import block_sizes, type_number

from llamadiff.llamacpp.library import load as library
from llamadiff.llamacpp.library import set_fields
from llamadiff.llamacpp.request import Request, Say
from llamadiff.llamacpp.session import Quiet, load
from llamadiff.system.errors import UnrunnableError


def load_only(request: Request, say: Say) -> None:
    """Load the model, and let go of it."""
    llama_cpp.llama_backend_init()
    with Quiet():
        load(request)


def tokenize_all(request: Request, say: Say) -> None:
    """Each text's ids, with and without what the model adds: ``ids``, a list of pairs."""
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    set_fields(params, vocab_only=True)
    with Quiet():
        model = llama_cpp.llama_model_load_from_file(os.fsencode(request.model), params)
        if not model:
            raise UnrunnableError(f"{request.model}: llama.cpp cannot load the vocabulary")
        vocabulary = llama_cpp.llama_model_get_vocab(model)
        if llama_cpp.llama_vocab_type(vocabulary) == 0:  # LLAMA_VOCAB_TYPE_NONE
            say(ids=None)
            return
        ids = []
        for text in request.texts:
            say(phase=f"tokenizing {text!r}"[:60])
            ids.append([_ids(vocabulary, text, special) for special in (True, False)])
        flags = {"add_bos": llama_cpp.llama_vocab_get_add_bos, "add_eos": llama_cpp.llama_vocab_get_add_eos}
        say(ids=ids, **{name: bool(ask(vocabulary)) for name, ask in flags.items()})


def _ids(vocabulary: Any, text: str, special: bool) -> list[int]:
    data = text.encode()
    room = len(data) + 16
    buffer = (llama_cpp.llama_token * room)()
    count = llama_cpp.llama_tokenize(vocabulary, data, len(data), buffer, room, special, True)
    return list(buffer[: max(count, 0)])


def quantize(request: Request, say: Say) -> None:
    """Rows of float32 in the file ``output`` become rows of blocks, as ggml's own quantizers make them."""
    assert request.output is not None
    quantizer = library("ggml-base").ggml_quantize_chunk
    place = ctypes.c_void_p
    count = ctypes.c_int64
    quantizer.restype, quantizer.argtypes = ctypes.c_size_t, [ctypes.c_int, place, place, count, count, count, place]
    values, at, made = np.fromfile(request.output, np.float32), 0, []
    for text in request.texts:
        kind, rows, width = text.split()[0], *map(int, text.split()[1:])
        some = np.ascontiguousarray(values[at : at + rows * width])
        at += rows * width
        per_block, size = block_sizes(kind)
        blocks = np.zeros(rows * width // per_block * size, np.uint8)
        even = np.ones(width, np.float32)  # the importance of every column, which some types ask for
        quantizer(type_number(kind), some.ctypes.data, blocks.ctypes.data, 0, rows, width, even.ctypes.data)
        made.append(blocks)
    Path(request.output).write_bytes(b"".join(blocks.tobytes() for blocks in made))


ERRANDS: Mapping[str, Callable[[Request, Say], None]] = {
    "load": load_only, "tokenize": tokenize_all, "quantize": quantize,
}  # fmt: skip
