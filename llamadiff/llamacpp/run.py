"""Serves one request: loads the model, tokenizes, and has it decoded by the recorder that was asked for."""

from __future__ import annotations

import time
from queue import Queue

from llamadiff.llamacpp.interface import Library
from llamadiff.llamacpp.record_taps import Capture
from llamadiff.llamacpp.record_way import WayRun
from llamadiff.llamacpp.request import PLAIN, TOKENIZING, Request, Say
from llamadiff.llamacpp.session import Loaded, Quiet, load, tokenize, without_bos
from llamadiff.system.errors import UserError


def run(library: Library, request: Request, say: Say, hear: Queue[str], loaded: Loaded | None = None) -> None:
    """Load, tokenize, decode, record; or an errand. ``hear``: what the parent says meanwhile; ``loaded``: a model that
    was loaded before it was asked for.
    """
    ready = loaded.taken_for(request) if loaded is not None else None
    if request.errand:
        from llamadiff.llamacpp.errands import ERRANDS

        ERRANDS[request.errand](library, request, say)
        say(done=True)
        return
    if not request.model:
        devices = [(device.name, device.description) for device in library.devices()]
        say(version=library.version(), build=library.flags(), layout=library.ggml.layout, devices=devices, done=True)
        return
    started = time.perf_counter()
    say(phase="loading the model into llama.cpp")
    with Quiet(library):
        model = ready or load(library, request)
        request = without_bos(library, model, request)
        if not request.tokens:
            say(phase=TOKENIZING)
        tokens = list(request.tokens) or tokenize(library, model, request)
        say(tokens=tokens, loaded=time.perf_counter() - started)
        say(phase="running llama.cpp")
        recorder = _kind_of(request)(library, model, request, tokens)
        recorder.hear = hear
        recorder.run(say)
        recorder.close()  # this process waits for another request, while its parent judges
        library.lib.llama_model_free(model)
    say(done=True)


def _kind_of(request: Request) -> type[Capture]:
    """What is to be done; what a mere capture does not need is not imported for it."""
    if request.graph is not None and request.output is None:
        from llamadiff.llamacpp.record_graph import GraphAlone

        return GraphAlone
    if request.live:
        from llamadiff.llamacpp.record_live import LiveCapture

        return LiveCapture
    if request.graph is None and not request.nodes and not request.keep_graph:
        return Capture if request.way == PLAIN else WayRun
    from llamadiff.llamacpp import record_graph

    if request.way != PLAIN:
        raise UserError(
            f"{request.model}: judged through llama.cpp's graph, and that is recorded in one go, with nobody beside; "
            "leave out ubatch, sequences, used and callback"
        )
    if request.nodes:
        return record_graph.NodeRun
    return record_graph.GraphRun if request.graph is not None else record_graph.CaptureWithGraph
