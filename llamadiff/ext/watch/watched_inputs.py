"""What encoders and text models of a watched program are given, kept where the user says: no graph computes it."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.ext.graph.node import Node

FED = ("inp_raw", "mel")  # what clip's encoders are given of a picture or a sound, and whisper.cpp's
# What llama.cpp's text models are given, and what it is called where it is kept.
GIVEN = {"inp_tokens": "inp_tokens", "inp_embd": "inp_embd", "embd": "inp_embd", "inp_pos": "inp_pos",
         "attn_inp_kq_mask": "mask", "self_kq_mask": "mask", "KQ_mask": "mask"}  # fmt: skip
OUTPUT = "encoder_output"
KINDS = {"f32": "<f4", "f16": "<f2", "i32": "<i4"}
MOST = 256  # arrays of text models that wait for an encoder, and that are kept behind one
MOST_BYTES = 1 << 28  # of those that wait


class KeptInputs:
    """Arrays in a folder, or none: a text model's once an encoder was seen, and what it was given until then."""

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._sees, self._count = folder, False, 0
        self._waiting: list[tuple[str, NDArray[Any]]] = []

    def keep(self, number: int, name: str, node: Node) -> None:
        """Keep a tensor's values. ``number``: of the graph."""
        shape, kind = tuple(reversed(node.said["ne"])), KINDS.get(node.type)
        if self._folder is None or kind is None or len(node.data) != np.dtype(kind).itemsize * prod(shape):
            return
        values, file = np.frombuffer(node.data, kind).reshape(shape), f"{number}-{name}.npy"
        if name in FED or name == OUTPUT:
            self._sees = True
            self._write(file, values)
            return
        self._count += 1
        if self._count > MOST:
            return
        if self._sees:
            self._write(file, values)
        elif sum(each.nbytes for _, each in self._waiting) + values.nbytes <= MOST_BYTES:
            self._waiting.append((file, np.array(values)))

    def _write(self, file: str, values: NDArray[Any]) -> None:
        assert self._folder is not None
        for name, each in (*self._waiting, (file, values)):
            np.save(self._folder / name, each)
        self._waiting = []
