"""What llama.cpp is asked besides runs, in its child process: does it load, how does it tokenize, how does it quantize.

``load`` and ``tokenize`` are about a request's model; ``quantize`` about float32 values in its ``data``, rows of types
that ``texts`` name (``Q4_K 8 2048``: eight rows of 2048), of which blocks are told; ``run`` about single ops; ``pair``
about two files of one model.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Mapping
from functools import partial

from llamadiff.llamacpp.blocks import blocks_of
from llamadiff.llamacpp.feed import Feed
from llamadiff.llamacpp.interface import Library, Loading
from llamadiff.llamacpp.request import Request, Say
from llamadiff.llamacpp.session import Quiet, ids_of, load
from llamadiff.llamacpp.tensors import Tensor
from llamadiff.system.errors import UnrunnableError


def load_only(library: Library, request: Request, say: Say, feed: Feed) -> None:
    """Load the model, and let go of it."""
    library.lib.llama_backend_init()
    with Quiet(library):
        load(library, request)


def tokenize_all(library: Library, request: Request, say: Say, feed: Feed) -> None:
    """Each text's ids, with and without what the model adds: ``ids``, a list of pairs."""
    lib = library.lib
    lib.llama_backend_init()
    with Quiet(library):
        model = library.load(os.fsencode(request.model), Loading(vocab_only=True))
        if not model:
            raise UnrunnableError(f"{request.model}: llama.cpp cannot load the vocabulary")
        vocabulary = lib.llama_model_get_vocab(model)
        if lib.llama_vocab_type(vocabulary) == 0:  # LLAMA_VOCAB_TYPE_NONE
            say(ids=None)
            return
        ids = []
        for text in request.texts:
            say(phase=f"tokenizing {text!r}"[:60])
            ids.append([ids_of(library, vocabulary, text, special)[1] for special in (True, False)])
        flags = {"add_bos": lib.llama_vocab_get_add_bos, "add_eos": lib.llama_vocab_get_add_eos}
        say(ids=ids, **{name: bool(ask(vocabulary)) for name, ask in flags.items()})


def quantize(library: Library, request: Request, say: Say, feed: Feed) -> None:
    """Rows of float32 as rows of blocks, as ggml's own quantizers make them."""
    values, at = base64.b64decode(request.data), 0
    for number, text in enumerate(request.texts):
        kind, rows, width = text.split()[0], *map(int, text.split()[1:])
        size = 4 * rows * width
        feed.send({"blocks": number}, blocks_of(library, kind, values[at : at + size], width))
        at += size


def run_pair(library: Library, request: Request, say: Say, feed: Feed) -> None:
    """Two files of one model, side by side: their logits, and those that each trial of ``texts`` comes to."""
    from llamadiff.llamacpp.two_files import TwoFiles

    library.lib.llama_backend_init()
    with Quiet(library):
        TwoFiles(library, request).run(say, feed)


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
    "load": load_only, "tokenize": tokenize_all, "quantize": quantize, "run": run_ops,
    "pair": run_pair,
}  # fmt: skip
