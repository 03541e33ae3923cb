"""llamadiff's trace writer for Python. SPDX-License-Identifier: MIT. Paste it anywhere.

Records what an engine computes, its tensors ("taps"), in one .safetensors file:

    trace = TraceWriter("mine.safetensors", tokens)  # the prompt's ids
    trace.state("name", "my engine")  # what is known of the run
    trace.add("Qcur_rope-0", q)  # q: [token, head, dim], a numpy array; torch: q.float().cpu().numpy()
    trace.add_tokens([next])  # a decode step: its id,
    trace.add("Qcur_rope-0", q)  # and its row, [1, head, dim], below those before
    trace.end()

An error is raised. Values are copied and kept in memory until the end. It writes path.part and renames it to path: a
trace of before is replaced, and a run that breaks off leaves it as it was.
"""

from __future__ import annotations

import json
import math
import operator
import os
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

# The axis of these that runs over tokens is the second: [head, query, ...].
BY_HEAD = ("kq-", "kq_soft_max-", "kqv-", "kqv_mla-", "q_nope_absorbed-")
SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I32": 4}
RUN, PRODUCER = ("prompt", "n_prefill", "positions", "batches"), ("name", "version")
GROUPS = ("settings", "hyperparameters", "model")


class Tap(NamedTuple):
    """A tap's type, its shape with all rows, the axis that runs over tokens, and what each call added."""

    dtype: str
    shape: list[int]
    axis: int
    parts: list[tuple[list[int], bytes]]


class TraceWriter:
    """One trace being written."""

    def __init__(self, path: str | os.PathLike[str], tokens: Iterable[int]) -> None:
        """Begin the trace of a run of these tokens: the prompt's; those of decode steps may follow."""
        self.path, self.ended = os.fspath(path), False
        self._tokens: list[int] = []
        self._taps: dict[str, Tap] = {}
        self._facts: dict[str, Any] = {}
        self.add_tokens(tokens)
        self._n_prompt = len(self._tokens)
        if not self._tokens:
            raise ValueError(f"{self.path}: the trace has no tokens")

    def add_tokens(self, tokens: Iterable[int]) -> None:
        """The ids that a decode step runs."""
        for token in map(operator.index, tokens):
            if not 0 <= token < 1 << 31:
                raise ValueError(f"{self.path}: token {len(self._tokens)} is {token}, no token id")
            self._tokens.append(token)

    def state(self, key: str, value: object) -> None:
        """State what is known of the run.

        name, version, prompt, n_prefill (how many tokens were run in one go; the prompt's, if not stated), positions,
        batches (how many ran at a time, if not one by one after the prompt),
        settings.type_k and type_v (how the cache keeps rows: "F16"), settings.flash_attn,
        hyperparameters.rope.freq_base (and others of GGUF's keys), model.file, model.sha256.
        """
        group, _, rest = key.partition(".")
        if key not in RUN + PRODUCER and not (group in GROUPS and rest):
            raise ValueError(f"{key}: nothing is stated by that name")
        if key in self._facts:
            raise ValueError(f"{key}: stated twice")
        try:
            self._facts[key] = json.loads(json.dumps(value, allow_nan=False))
        except (ValueError, TypeError):
            raise ValueError(f"{key}: {value} cannot be stated") from None

    def add(self, name: str, values: Any, shape: Sequence[int] | None = None) -> None:
        """Add the rows of a tap: any buffer of floats (numpy, array, ctypes), with its own shape if none is given.

        Rows that are added under the same name go below those before; scores may see more keys each time, and keys not
        yet seen are zero.
        """
        view = memoryview(values)
        dtype = {"d": "F64", "f": "F32", "e": "F16"}.get(view.format.lstrip("<=@"))
        if dtype is None:
            raise TypeError(f"{name}: values of type {view.format!r}; floats are needed, or add_as")
        self.add_as(name, dtype, view, shape)

    def add_as(self, name: str, dtype: str, values: Any, shape: Sequence[int] | None = None) -> None:
        """The same for BF16 (uint16: its bits; torch: x.view(torch.int16).numpy()), I32, or bytes with a shape."""
        view = memoryview(values)
        dims = [operator.index(dim) for dim in (view.shape or () if shape is None else shape)]
        if self.ended:
            raise ValueError(f"{self.path}: the trace has ended")
        if dtype not in SIZES:
            raise ValueError(f"{name}: type {dtype}; {', '.join(SIZES)} are possible")
        if not name or name == "__metadata__":
            raise ValueError(f"{name!r}: is no name of a tap")
        if not 1 <= len(dims) <= 8 or min(dims) < 1:
            raise ValueError(f"{name}: shape {dims}; 1 to 8 dims of at least 1 are possible")
        if SIZES[dtype] * math.prod(dims) != view.nbytes or view.itemsize not in (1, SIZES[dtype]):
            raise ValueError(f"{name}: {view.nbytes} bytes, {view.itemsize} a value, for {dtype} {dims}")
        axis = 1 if len(dims) == 3 and name.startswith(BY_HEAD) else 0
        tap = self._taps.get(name) or Tap(dtype, [*dims[:axis], 0, *dims[axis + 1 :]], axis, [])
        grows = (axis, 2 if axis == 1 else axis)
        alike = (i in grows or tap.shape[i] == dim for i, dim in enumerate(dims))
        if tap.dtype != dtype or len(tap.shape) != len(dims) or not all(alike):
            raise ValueError(f"{name}: rows of another type or shape cannot follow those before")
        tap.shape[axis] += dims[axis]
        if axis == 1:
            tap.shape[2] = max(tap.shape[2], dims[2])
        tap.parts.append((dims, _little_endian(view)))
        self._taps[name] = tap

    def end(self) -> None:
        """Write the file."""
        if self.ended:
            raise ValueError(f"{self.path}: the trace has ended")
        self.ended = True
        part = f"{self.path}.part"
        try:
            with open(part, "wb") as file:
                file.writelines(self._chunks())
            os.replace(part, self.path)
        except BaseException:
            with suppress(OSError):
                os.unlink(part)
            raise

    def _chunks(self) -> Iterator[bytes]:
        """The header; then of each tap, part below part for each head. What rows are too short is zero."""
        header = self._header().encode()
        header += b" " * (-len(header) % 8)
        yield struct.pack("<Q", len(header)) + header
        for dtype, whole, axis, parts in self._taps.values():
            longest = math.prod(whole[axis + 1 :]) * SIZES[dtype]
            for head in range(math.prod(whole[:axis])):
                for shape, data in parts:
                    row = math.prod(shape[axis + 1 :]) * SIZES[dtype]
                    for i in range(head * shape[axis], (head + 1) * shape[axis]):
                        yield data[i * row : (i + 1) * row].ljust(longest, b"\0")

    def _header(self) -> str:
        groups: dict[str, dict[str, Any]] = {group: {} for group in (*GROUPS, "run", "producer")}
        for key, value in self._facts.items():
            group, _, rest = key.partition(".")
            groups["run" if key in RUN else "producer" if key in PRODUCER else group][rest or key] = value
        run = {"n_prefill": self._n_prompt} if len(self._tokens) > self._n_prompt else {}
        stated = {name: groups[name] for name in ("settings", "hyperparameters") if groups[name]}
        producer = {"writer": "python", **groups["producer"], **stated}
        info = {"schema": "llamadiff.trace/1", "tokens": self._tokens, **run, **groups["run"], "producer": producer}
        info |= {"model": groups["model"]} if groups["model"] else {}
        header: dict[str, Any] = {"__metadata__": {"llamadiff": json.dumps(info)}}  # JSON in a string of JSON
        end = 0
        for name, (dtype, shape, _, _) in self._taps.items():
            start, end = end, end + math.prod(shape) * SIZES[dtype]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        return json.dumps(header)


def _little_endian(values: memoryview) -> bytes:
    """The values' bytes in C order, also of a view with strides."""
    data = values.tobytes()
    if sys.byteorder == "big":
        size = values.itemsize
        data = b"".join(data[i : i + size][::-1] for i in range(0, len(data), size))
    return data
