"""What llama.cpp's process is asked of a reranker's vocabulary: its special tokens, and which it puts around texts."""

from __future__ import annotations

import ctypes
import os

from llamadiff.llamacpp.interface import Library, Loading
from llamadiff.llamacpp.request import Request, Say
from llamadiff.llamacpp.session import Quiet, ask_model, ids_of
from llamadiff.llamacpp.tensor_transport import Feed
from llamadiff.system.errors import UnrunnableError

NAMES = ("bos", "eos", "sep")


def texts_for_ranking(library: Library, request: Request, say: Say, feed: Feed) -> None:
    """The ``ids`` of each text with nothing around it, special tokens in the first ``n_prefill`` texts alone taken for
    such; and of each of NAMES its id (``special``), and whether the vocabulary adds it (``adds``).
    """
    with Quiet(library):
        library.lib.llama_backend_init()
        model = library.load(os.fsencode(request.model), Loading(vocab_only=True))
        if not model:
            raise UnrunnableError(f"{request.model}: llama.cpp cannot load the vocabulary")
        lib, vocabulary = library.lib, library.lib.llama_model_get_vocab(model)
        found = {name: ask_model(lib, f"llama_vocab_{name}", vocabulary) for name in NAMES}
        adds = {name: bool(ask_model(lib, f"llama_vocab_get_add_{name}", vocabulary, ctypes.c_bool)) for name in NAMES}
        is_text = lib.llama_vocab_type(vocabulary) != 0  # LLAMA_VOCAB_TYPE_NONE
        ids = [ids_of(library, model, text, special=False, parse=number < request.n_prefill)[1]
               for number, text in enumerate(request.texts)] if is_text else None  # fmt: skip
        say(ids=ids, special=found, adds=adds)
        lib.llama_model_free(model)
