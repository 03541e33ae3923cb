"""Serves one request: loads the model, tokenizes, and tells of its run; or an errand."""

from __future__ import annotations

import time
from pkgutil import resolve_name
from queue import Queue

from llamadiff.llamacpp.interface import Library
from llamadiff.llamacpp.observer import Observer
from llamadiff.llamacpp.request import TOKENIZING, Request
from llamadiff.llamacpp.session import Loaded, Quiet, load, tokenize, without_bos
from llamadiff.llamacpp.tensor_transport import Feed, Voice


def run(
    library: Library, request: Request, voice: Voice, hear: Queue[str], shared: int | None, loaded: Loaded | None = None
) -> None:
    """Load, tokenize, decode, tell; or an errand.

    ``hear``: what the parent says meanwhile; ``shared``: the descriptor of memory that it reads too; ``loaded``: a
    model that was loaded before it was asked for.
    """
    ready = loaded.taken_for(request) if loaded is not None else None
    feed = Feed(voice, hear, shared)
    if request.errand:
        resolve_name(request.errand)(library, request, voice, feed)
        voice(done=True)
        return
    if not request.model:
        devices = [(device.name, device.description, device.kind) for device in library.devices()]
        voice(version=library.version(), build=library.flags(), layout=library.ggml.layout, devices=devices,
              **library.machine(), done=True)  # fmt: skip
        return
    started = time.perf_counter()
    voice(phase="loading the model into llama.cpp")
    with Quiet(library):
        model = ready or load(library, request)
        request = without_bos(library, model, request)
        if not request.tokens:
            voice(phase=TOKENIZING)
        tokens = list(request.tokens) or tokenize(library, model, request)
        voice(tokens=tokens, loaded=time.perf_counter() - started)
        voice(phase="running llama.cpp")
        kind = resolve_name(request.way.observer) if request.way.observer else Observer
        observer: Observer = kind(library, model, request, tokens, feed)
        observer.run(voice)
        observer.close()  # this process waits for another request, while its parent judges
        library.lib.llama_model_free(model)
    voice(done=True)
