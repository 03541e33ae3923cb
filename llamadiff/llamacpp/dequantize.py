"""Dequantization many times faster than gguf-py's, ggml's as a rule, and held to it on sampled rows of every tensor."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from threading import Event, Lock, Thread
from typing import Any

import numpy as np
from llamaref import Weights
from llamaref.weights import block_sizes, type_number
from numpy.random import default_rng  # here: in the thread, Ctrl-C during an import would leave its lock held
from numpy.typing import NDArray

from llamadiff.llamacpp.blocks import TypeTraits
from llamadiff.llamacpp.library import load
from llamadiff.numerics.compiled.decoder import Decoder, own
from llamadiff.system.errors import UserError

Array = NDArray[Any]
SAMPLES = 8  # random rows of each tensor that are decoded both ways, besides its first and last


class Dequantizer:
    """Decoders of a file's tensors: one compiled here, or ggml's, where it gives what gguf-py gives; else None, and
    gguf-py is used.

    ``trusted`` and ``refused`` name the tensors that were compared and asked for. Without llama-cpp-python there are
    none.
    """

    def __init__(self, weights: Weights, lib: Any = None) -> None:
        """``lib``: the ggml that is asked; llama-cpp-python's, unless it is given."""
        self.weights, self._lib = weights, lib
        self.trusted: set[str] = set()
        self.refused: set[str] = set()
        self._decoders: dict[str, Decoder | None] = {}
        self._same: dict[str, bool] = {}
        self._lock = Lock()

    @classmethod
    def of(cls, weights: Weights, threads: int = 0) -> Dequantizer:
        """Have a file's weights decoded and multiplied fast, in so many ``threads`` (0: as many as cores)."""
        made = cls(weights)
        pool = ThreadPoolExecutor(threads or os.cpu_count(), initializer=partial(np.seterr, all="ignore"))
        weights.decoder, weights.map = made.decoder, partial(_spread, pool)
        return made

    def decoder(self, name: str) -> Decoder | None:
        """What makes floats of a tensor's rows, [row, bytes] -> [row, in]; None: as gguf-py does."""
        decoder = self._decoder_of(name)
        if name in self._same:
            (self.trusted if self._same[name] else self.refused).add(name)
        return decoder

    @contextmanager
    def checking_ahead(self) -> Iterator[None]:
        """Compare the decoders of all matrices in a thread, while this one waits for something else.

        The thread ends with the block: one that is inside NumPy or ggml when Python exits would abort the process.
        """
        names = [name for name in self.weights if len(self.weights.shape(name)) > 1]
        stop = Event()

        def check() -> None:
            for name in names:
                if stop.is_set():
                    return
                with suppress(Exception):  # whoever asks for this decoder is told
                    self._decoder_of(name)

        thread = Thread(target=check)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _decoder_of(self, name: str) -> Decoder | None:
        with self._lock:
            if name not in self._decoders:
                self._decoders[name] = self._choose_decoder(name)
            return self._decoders[name]

    def _choose_decoder(self, name: str) -> Decoder | None:
        """The fastest decoder that gives what gguf-py gives of some rows."""
        stored, kind = self.weights.read_raw(name), self.weights.type(name)
        of_ggml, faster = self.of_type(kind), self._own(kind)
        if of_ggml is None and faster is None:
            return None
        flat = stored.reshape(-1, stored.shape[-1])
        chosen = default_rng(len(flat)).integers(0, len(flat), SAMPLES)
        rows = flat[sorted({0, len(flat) - 1, *chosen.tolist()})]
        wanted = self.weights.decode_rows(name, rows)
        if of_ggml is not None:
            self._same[name] = np.array_equal(of_ggml(rows), wanted, equal_nan=True)
        if faster is not None and np.array_equal(faster(rows), wanted, equal_nan=True):
            return faster
        return of_ggml if self._same.get(name) else None

    def _own(self, kind: str) -> Decoder | None:
        """That of a type which ggml decodes slowly."""
        function = own(kind)
        return Decoder(function, *block_sizes(kind)) if function is not None else None

    def of_type(self, kind: str) -> Decoder | None:
        """ggml's own decoder of a type, trusted or not; None if there is no such function, or none is needed."""
        if kind == "F16":
            function, values, size = self._halves, 1, 1
        else:
            values, size = block_sizes(kind)
            function = self._to_float(kind, values, size)
        return None if function is None else Decoder(function, values, size)

    def _to_float(self, kind: str, values: int, size: int) -> Any:
        """``to_float`` of a type of blocks, if the library describes the type as gguf-py does."""
        if self._base is None:
            return None
        number = type_number(kind)
        traits = self._base.ggml_get_type_traits(number).contents
        described = traits.name, traits.block_size, traits.type_size
        expected = self._base.ggml_type_name(number), values, size
        fits = described == expected and expected[0].decode().upper() == kind
        wanted = fits and (traits.is_quantized or kind == "BF16")
        return traits.to_float if wanted and traits.to_float else None  # a null pointer for Q8_K

    @cached_property
    def _base(self) -> Any:
        try:
            library = self._lib or load("ggml-base")
        except UserError:
            return None
        library.ggml_get_type_traits.restype = ctypes.POINTER(TypeTraits)
        library.ggml_get_type_traits.argtypes = [ctypes.c_int]
        library.ggml_type_name.restype, library.ggml_type_name.argtypes = ctypes.c_char_p, [ctypes.c_int]
        return library

    @cached_property
    def _halves(self) -> Any:
        """ggml's conversion of float16 by the processor's own instruction: ``to_float`` looks each value up.

        Where the processor has none, this looks them up too, in a table that is to be made first.
        """
        try:
            library = self._lib or load("ggml-cpu")
            library.ggml_cpu_init()
            function = library.ggml_cpu_fp16_to_fp32
        except (UserError, AttributeError):
            return None
        function.restype, function.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        return function


def _spread(pool: ThreadPoolExecutor, work: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
    """As the pool's ``map``; what is in one piece is done here, as handing it over takes longer than many do."""
    if len(items) > 1:
        return pool.map(work, items)
    with np.errstate(all="ignore"):
        return iter([work(each) for each in items])
