"""Programs for tests to watch: each is a Python that loads llama.cpp by ctypes, as a user's does."""

from __future__ import annotations

import ctypes
import hashlib
import sys
import threading
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp

from llamadiff.llamacpp.blocks import TypeTraits

TOKENS = (1, 5, 9, 30, 17, 22)
EVAL = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)
TO_FLOAT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(ctypes.c_float), ctypes.c_int64)
FROM_FLOAT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
F16, Q5_1 = 1, 7


def loaded(path: str, repacked: bool = False) -> Any:
    """A model; ``repacked``: with weights in a memory that gives nothing back, as programs have it by default."""
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers, params.use_extra_bufts = 0, repacked
    return llama_cpp.llama_model_load_from_file(path.encode(), params)


def ran(model: Any, steps: int, observe: Any = None, room: int = 256) -> str:
    """A prompt and decode steps: a hash of all logits. Where there is no more room, what was decoded is forgotten."""
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_threads, params.n_threads_batch = room, 1, 1
    if observe is not None:
        params.cb_eval = ctypes.cast(observe, type(params.cb_eval))
    context, digest = llama_cpp.llama_init_from_model(model, params), hashlib.sha256()
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    used = 0
    for tokens in chain((TOKENS,), ((7 + step % 64,) for step in range(steps))):
        if used + len(tokens) > room:
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
            used = 0
        used += len(tokens)
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        assert llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, len(tokens))) == 0
        digest.update(ctypes.string_at(llama_cpp.llama_get_logits_ith(context, -1), 4 * vocabulary))
    llama_cpp.llama_free(context)
    return digest.hexdigest()


def text(path: str, steps: str, code: str = "0") -> None:
    """Decode, and end with an exit code."""
    print(ran(loaded(path), int(steps)))
    sys.exit(int(code))


def repacked(path: str) -> None:
    """As llama.cpp does where nobody says otherwise."""
    print(ran(loaded(path, repacked=True), 2))


def observed(path: str) -> None:
    """With an eval callback of its own, which wants every third node."""
    asked, got = [0], [0]

    @EVAL
    def observe(_: int, ask: bool, __: object) -> bool:
        asked[0] += ask
        got[0] += not ask
        return not ask or asked[0] % 3 == 0

    print(ran(loaded(path), 2, observe), asked, got)


def threads(path: str) -> None:
    """Two contexts of one model, each in a thread."""
    model, found = loaded(path), dict[int, str]()
    work = [threading.Thread(target=lambda n=n: found.update({n: ran(model, 6)})) for n in range(2)]
    for each in work:
        each.start()
    for each in work:
        each.join()
    print(found[0] == found[1], found[0])


def faulty(path: str) -> None:
    """Rows of Q5_1 that are looked up are a little off: ggml's own function is replaced in its table."""
    model, lines = loaded(path), Path("/proc/self/maps").read_text("utf-8").split()
    base = ctypes.CDLL(next(word for word in lines if "/libggml-base" in word))  # of several copies the one in use
    base.ggml_get_type_traits.restype = ctypes.POINTER(TypeTraits)
    traits = base.ggml_get_type_traits(Q5_1).contents
    right = traits.to_float

    @TO_FLOAT
    def wrong(x: int, y: Any, count: int) -> None:
        right(x, y, count)
        y[3] *= 1.01

    page = ctypes.addressof(traits) & ~4095
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(page), 8192, 3) == 0
    place = ctypes.addressof(traits) + TypeTraits.to_float.offset
    ctypes.c_void_p.from_address(place).value = ctypes.cast(wrong, ctypes.c_void_p).value
    print(ran(model, 0))


def cached(path: str, wrong: str = "") -> None:
    """With a large cache; where asked, values are rounded a little off when they are written into it."""
    model, lines = loaded(path), Path("/proc/self/maps").read_text("utf-8").split()
    cpu = ctypes.CDLL(next(word for word in lines if "/libggml-cpu" in word))
    cpu.ggml_get_type_traits_cpu.restype = ctypes.POINTER(ctypes.c_void_p)
    place = ctypes.addressof(cpu.ggml_get_type_traits_cpu(F16).contents)
    right = FROM_FLOAT(ctypes.c_void_p.from_address(place).value)

    @FROM_FLOAT
    def off(x: int, y: int, count: int) -> None:
        right(x, y, count)
        ctypes.c_uint16.from_address(y + 2).value ^= 16

    if wrong:
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(place & ~4095), 8192, 3) == 0
        ctypes.c_void_p.from_address(place).value = ctypes.cast(off, ctypes.c_void_p).value
    print(ran(model, 2, room=2048))


PROGRAMS: dict[str, Callable[..., None]] = {
    each.__name__: each for each in (text, repacked, observed, threads, faulty, cached)
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
