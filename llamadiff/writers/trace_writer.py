"""llamadiff's trace writer for Python. SPDX-License-Identifier: MIT. Paste it anywhere.

Records what an engine computes, float32 tensors ("taps") in one .safetensors file:

    trace = TraceWriter("mine.safetensors", tokens)
    trace.add("Qcur_rope-0", q)  # q: [token, head, dim], a numpy array; torch: q.float().cpu().numpy()
    trace.end()

Every method raises on an error, which ends the trace: later calls raise as well. The values are written when they are
added, to path.part; it is renamed at the end, so a run that breaks off leaves no trace.

    8 bytes          length of the header, little-endian
    HEADER_BYTES     the header: JSON, padded with spaces; its place is kept free and written last
    the rest         the values, in the order they came

Decode steps: a tap is added once and has one row for each token, the prompt's and then the steps'. Keep each tap's
rows until the last token is known, then begin with all tokens and add. Scores are [head, query, key], and zero for the
keys that came after the query.
"""

import json
import math
import operator
import os
import re
import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from typing import Any

HEADER_BYTES = 1 << 20  # enough for 10000 taps; a multiple of 8
_FLOAT32 = ("f", "<f" if sys.byteorder == "little" else ">f")  # as buffers call it: numpy, array and ctypes
_BYTES = ("B", "b", "c")


class TraceWriter:
    """One trace being written."""

    def __init__(self, path: str | os.PathLike[str], tokens: Iterable[int]) -> None:
        """Begin the trace of a run of these tokens."""
        self.path = os.fspath(path)
        self.part = f"{self.path}.part"
        ids = [operator.index(token) for token in tokens]
        if not ids:
            raise ValueError(f"{self.path}: the trace has no tokens")
        wrong = next((i for i, token in enumerate(ids) if not 0 <= token < 1 << 31), None)
        if wrong is not None:
            raise ValueError(f"{self.path}: token {wrong} is {ids[wrong]}, no token id")
        info = _json({"schema": "llamadiff.trace/1", "tokens": ids})
        self._header = _json({"__metadata__": {"llamadiff": info}})[:-1]  # still open: taps follow
        if len(self._header) >= HEADER_BYTES:
            raise ValueError(f"{self.path}: too many tokens; raise HEADER_BYTES")
        self._names = {"__metadata__"}
        self._data_size = 0
        self._file = FileIO(self.part, "wb")
        self._file.seek(8 + HEADER_BYTES)

    def add(self, name: str, values: Any, shape: Sequence[int] | None = None) -> None:
        """Write a tap: any buffer of float32 (its own shape if none is given), or little-endian bytes and a shape."""
        with self._guard():
            if not re.fullmatch(r"[ !#-~]{1,256}", name):
                raise ValueError(f"{name!r}: a name is 1 to 256 characters of printable ASCII without quotes")
            if name in self._names:
                raise ValueError(f"{name}: added twice; add the rows of all steps in one call")
            view = memoryview(values)
            if view.format not in (_FLOAT32 if shape is None else _FLOAT32 + _BYTES):
                raise TypeError(f"{name}: values of type {view.format!r}; float32 is needed, or bytes and a shape")
            dims = [operator.index(dim) for dim in (view.shape or () if shape is None else shape)]
            if not 1 <= len(dims) <= 8 or min(dims) < 1:
                raise ValueError(f"{name}: shape {dims}; 1 to 8 dims of at least 1 are possible")
            if 4 * math.prod(dims) != view.nbytes:
                raise ValueError(f"{name}: {view.nbytes / 4:g} values for shape {dims}")
            start, end = self._data_size, self._data_size + view.nbytes
            entry = _json({name: {"dtype": "F32", "shape": dims, "data_offsets": [start, end]}})
            if len(self._header) + len(entry) >= HEADER_BYTES:
                raise ValueError(f"{name}: too many taps, the header is full; raise HEADER_BYTES")
            self._write(_little_endian(view))
            self._header += f",{entry[1:-1]}"
            self._names.add(name)
            self._data_size = end

    def end(self) -> None:
        """Write the header and give the file its name."""
        with self._guard():
            self._file.seek(0)
            self._write(struct.pack("<Q", HEADER_BYTES) + f"{self._header}}}".encode().ljust(HEADER_BYTES))
            self._file.close()
            os.replace(self.part, self.path)

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """If the work fails, close the writer and remove the file, which has not got its name."""
        if self._file.closed:
            raise ValueError(f"{self.path}: the trace has ended")
        try:
            yield
        except BaseException:
            self._file.close()
            with suppress(FileNotFoundError):
                os.unlink(self.part)
            raise

    def _write(self, data: bytes) -> None:
        """One write may take less than it is given."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _little_endian(values: memoryview) -> bytes:
    """The values' bytes in C order, also of a view with strides."""
    data = values.tobytes()
    if sys.byteorder == "little" or values.format in _BYTES:
        return data
    swapped = array("f", data)
    swapped.byteswap()
    return swapped.tobytes()
