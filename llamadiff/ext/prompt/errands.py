"""What llama.cpp's process is asked of a vocabulary: how it tokenizes, and its pieces."""

from __future__ import annotations

import os
from functools import lru_cache, partial

from llamadiff.llamacpp.interface import Handle, Library, Loading
from llamadiff.llamacpp.request import Request, Say
from llamadiff.llamacpp.session import Quiet, ids_of, piece_of
from llamadiff.llamacpp.tensor_transport import Feed
from llamadiff.system.errors import UnrunnableError


@lru_cache(maxsize=1)
def _with_tokens(library: Library, path: str) -> Handle | None:
    """A file's model with its vocabulary alone, which is kept for the next request; None where it has none."""
    library.lib.llama_backend_init()
    model = library.load(os.fsencode(path), Loading(vocab_only=True))
    if not model:
        raise UnrunnableError(f"{path}: llama.cpp cannot load the vocabulary")
    vocabulary = library.lib.llama_model_get_vocab(model)
    return model if library.lib.llama_vocab_type(vocabulary) else None  # 0: LLAMA_VOCAB_TYPE_NONE


def tokenize_all(library: Library, request: Request, say: Say, feed: Feed, special: bool = True) -> None:
    """The ``ids`` of each text, special tokens found in it; None without a tokenizer.

    ``special``: with what the model adds around a text.
    """
    with Quiet(library):
        model = _with_tokens(library, request.model)
        if model is None:
            say(ids=None)
            return
        say(phase=f"llama.cpp tokenizes {len(request.texts)} texts")
        ids = [ids_of(library, model, text, special)[1] for text in request.texts]
        vocabulary = library.lib.llama_model_get_vocab(model)
        say(ids=ids, add_bos=bool(library.lib.llama_vocab_get_add_bos(vocabulary)))


def pieces_all(library: Library, request: Request, say: Say, feed: Feed) -> None:
    """The ``pieces`` of all tokens, special ones too: bytes as characters of Latin-1; None without a tokenizer."""
    with Quiet(library):
        model = _with_tokens(library, request.model)
        vocabulary = library.lib.llama_model_get_vocab(model) if model is not None else None
        count = library.lib.llama_vocab_n_tokens(vocabulary) if model is not None else 0
        pieces = [piece_of(library, model, token).decode("latin-1") for token in range(count)]
        say(pieces=pieces or None)


tokenize_plain = partial(tokenize_all, special=False)  # with nothing added around a text
