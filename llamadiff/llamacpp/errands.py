"""What llama.cpp is asked besides runs, in its child process: does it load, how does it tokenize, how does it quantize.

``load``, ``tokenize`` (``-plain``: with nothing added) and ``pieces`` are about a request's model; ``quantize`` about
float32 values in its ``data``, rows of types that ``texts`` name (``Q4_K 8 2048``: eight rows of 2048), of which blocks
are told; ``run`` about single ops. Slices have errands of their own, which are asked for as ``module:function``.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Mapping
from functools import lru_cache, partial

from llamadiff.llamacpp.blocks import blocks_of
from llamadiff.llamacpp.feed import Feed
from llamadiff.llamacpp.interface import Handle, Library, Loading
from llamadiff.llamacpp.request import Request, Say
from llamadiff.llamacpp.session import Quiet, ids_of, load, piece_of
from llamadiff.llamacpp.tensors import Tensor
from llamadiff.system.errors import UnrunnableError


def load_only(library: Library, request: Request, say: Say, feed: Feed) -> None:
    """Load the model, and let go of it."""
    library.lib.llama_backend_init()
    with Quiet(library):
        load(library, request)


@lru_cache(maxsize=1)
def _vocabulary(library: Library, path: str) -> Handle | None:
    """A file's vocabulary, which is kept for the next request; None where it has none."""
    library.lib.llama_backend_init()
    model = library.load(os.fsencode(path), Loading(vocab_only=True))
    if not model:
        raise UnrunnableError(f"{path}: llama.cpp cannot load the vocabulary")
    vocabulary = library.lib.llama_model_get_vocab(model)
    return vocabulary if library.lib.llama_vocab_type(vocabulary) else None  # 0: LLAMA_VOCAB_TYPE_NONE


def tokenize_all(library: Library, request: Request, say: Say, feed: Feed, special: bool = True) -> None:
    """The ``ids`` of each text, special tokens found in it; None without a tokenizer.

    ``special``: with what the model adds around a text.
    """
    with Quiet(library):
        vocabulary = _vocabulary(library, request.model)
        if vocabulary is None:
            say(ids=None)
            return
        say(phase=f"llama.cpp tokenizes {len(request.texts)} texts")
        ids = [ids_of(library, vocabulary, text, special)[1] for text in request.texts]
        say(ids=ids, add_bos=bool(library.lib.llama_vocab_get_add_bos(vocabulary)))


def pieces_all(library: Library, request: Request, say: Say, feed: Feed) -> None:
    """The ``pieces`` of all tokens, special ones too: bytes as characters of Latin-1; None without a tokenizer."""
    with Quiet(library):
        vocabulary = _vocabulary(library, request.model)
        count = library.lib.llama_vocab_n_tokens(vocabulary) if vocabulary is not None else 0
        pieces = [piece_of(library, vocabulary, token).decode("latin-1") for token in range(count)]
        say(pieces=pieces or None)


def quantize(library: Library, request: Request, say: Say, feed: Feed) -> None:
    """Rows of float32 as rows of blocks, as ggml's own quantizers make them."""
    values, at = base64.b64decode(request.data), 0
    for number, text in enumerate(request.texts):
        kind, rows, width = text.split()[0], *map(int, text.split()[1:])
        size = 4 * rows * width
        feed.send({"blocks": number}, blocks_of(library, kind, values[at : at + size], width))
        at += size


def run_ops(library: Library, request: Request, say: Say, feed: Feed) -> None:
    """Saved ops (``texts`` describe them) on the device of the settings; what each gives is told."""
    from llamadiff.llamacpp.run_op import OpRunner, SavedOp

    library.lib.llama_backend_init()
    runner = OpRunner(library, request.settings.device)
    for number, text in enumerate(request.texts):
        saved = SavedOp(**json.loads(text))
        say(phase=f"running {os.path.basename(saved.path)}")
        runner.run(saved, partial(_tell_result, feed, number))
    say(device=runner.device.name, **library.machine())


def _tell_result(feed: Feed, number: int, node: Tensor) -> None:
    feed.send({"ran": number, "node": node.said()}, node.data)


ERRANDS: Mapping[str, Callable[[Library, Request, Say, Feed], None]] = {
    "load": load_only, "tokenize": tokenize_all,
    "tokenize-plain": partial(tokenize_all, special=False), "pieces": pieces_all, "quantize": quantize, "run": run_ops,
}  # fmt: skip
