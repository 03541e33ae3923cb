"""Serves one request: loads the model, tokenizes, and has it decoded by the recorder that was asked for."""

from __future__ import annotations

import os
import time

from llama_cpp import llama_cpp

from llamadiff.llamacpp.record_taps import Capture
from llamadiff.llamacpp.request import TOKENIZING, Request, Say
from llamadiff.llamacpp.session import Quiet, build_flags, build_version, load, tokenize, without_bos
from llamadiff.llamacpp.tensors import Ggml


def run(request: Request, say: Say) -> None:
    """Load, tokenize, decode, record; or an errand."""
    if request.errand:
        from llamadiff.llamacpp.errands import ERRANDS

        ERRANDS[request.errand](request, say)
        say(done=True)
        return
    ggml = Ggml()
    if request.output is None:
        say(version=build_version(), build=build_flags(), layout=ggml.layout, done=True)
        return
    os.environ["LLAMA_ATTN_ROT_DISABLE"] = "1"  # a quantized KV cache as everybody knows it, not rotated
    llama_cpp.llama_backend_init()
    started = time.perf_counter()
    say(phase="loading the model into llama.cpp")
    with Quiet():
        model = load(request)
        request = without_bos(model, request)
        if not request.tokens:
            say(phase=TOKENIZING)
        tokens = list(request.tokens) or tokenize(model, request)
        say(tokens=tokens, loaded=time.perf_counter() - started)
        say(phase="running llama.cpp")
        _kind_of(request)(ggml, model, request, tokens).run(say)
    say(done=True)


def _kind_of(request: Request) -> type[Capture]:
    """What is to be done; what a mere capture does not need is not imported for it."""
    if request.graph is None and not request.nodes and not request.keep_graph:
        return Capture
    from llamadiff.llamacpp import record_graph

    if request.nodes:
        return record_graph.NodeRun
    return record_graph.GraphRun if request.graph is not None else record_graph.CaptureWithGraph
