"""What llama.cpp is asked besides runs, in its child process: does it load, how does it tokenize, how does it quantize.

``load`` and ``tokenize`` are about a request's model; ``quantize`` about float32 values in the file ``output``, rows of
types that ``texts`` name (``Q4_K 8 2048``: eight rows of 2048), which blocks then replace; ``run`` about single ops;
``pair`` about two files of one model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from llamadiff.llamacpp.blocks import blocks_of
from llamadiff.llamacpp.interface import Library, Loading
from llamadiff.llamacpp.request import Request, Say
from llamadiff.llamacpp.session import Quiet, ids_of, load
from llamadiff.system.errors import UnrunnableError


def load_only(library: Library, request: Request, say: Say) -> None:
    """Load the model, and let go of it."""
    library.lib.llama_backend_init()
    with Quiet(library):
        load(library, request)


def tokenize_all(library: Library, request: Request, say: Say) -> None:
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


def quantize(library: Library, request: Request, say: Say) -> None:
    """Rows of float32 in the file ``output`` become rows of blocks, as ggml's own quantizers make them."""
    assert request.output is not None
    values, at, made = np.fromfile(request.output, np.float32), 0, []
    for text in request.texts:
        kind, rows, width = text.split()[0], *map(int, text.split()[1:])
        made.append(blocks_of(library, kind, values[at : at + rows * width].reshape(rows, width)))
        at += rows * width
    Path(request.output).write_bytes(b"".join(blocks.tobytes() for blocks in made))


def run_pair(library: Library, request: Request, say: Say) -> None:
    """Two files of one model, side by side; what each trial of ``texts`` comes to is written to ``output``."""
    from llamadiff.llamacpp.two_files import TwoFiles

    library.lib.llama_backend_init()
    with Quiet(library):
        TwoFiles(library, request).run(say)


def run_ops(library: Library, request: Request, say: Say) -> None:
    """Saved ops (``texts`` are their files) on the device of the settings; what each gives is a file in ``output``."""
    from llamadiff.llamacpp.run_op import OpRunner

    assert request.output is not None
    library.lib.llama_backend_init()
    runner = OpRunner(library, request.settings.device)
    for number, path in enumerate(request.texts):
        say(phase=f"running {Path(path).name}")
        np.save(Path(request.output) / f"{number}.npy", runner.run(Path(path)))
    say(device=runner.device.name)


ERRANDS: Mapping[str, Callable[[Library, Request, Say], None]] = {
    "load": load_only, "tokenize": tokenize_all, "quantize": quantize, "run": run_ops,
    "pair": run_pair,
}  # fmt: skip
