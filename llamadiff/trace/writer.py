"""Traces are written as a stream: tap by tap, memory for one."""

from __future__ import annotations

import json
import mmap
import os
import struct
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.system.errors import UserError
from llamadiff.system.output import NO_ROOM, OPEN_FILES_MOVE, check_target, move_aside, unwritten
from llamadiff.system.stale_files import temporary_file
from llamadiff.trace.metadata import KEY, Info
from llamadiff.trace.reader import DTYPES, Trace

Array = NDArray[Any]


STORED = {**DTYPES, "U8": np.dtype("u1")}
_HEADER_ROOM = 4096  # bytes of header set aside for the metadata
TAP_ROOM = 160  # and for each tap, which takes about 100
_GROWTH = 64 << 20  # bytes by which the file grows while it is read: every map of it keeps a descriptor


class TraceWriter:
    """Writes a trace tap by tap; the file appears under its name when it is complete, or not at all.

    Use as a context manager. ``rows`` of a tap may arrive in several calls (a prefill, then decode steps).
    """

    def __init__(self, path: str | Path, expected_taps: int = 1000) -> None:
        self.path = Path(path)
        self._room = _HEADER_ROOM + TAP_ROOM * expected_taps
        self._entries: dict[str, tuple[str, tuple[int, ...], int]] = {}  # name -> dtype, shape, offset
        self._end = 0
        self._file: Any = None
        self._full: OSError | None = None  # the disk: what is added is counted, not written
        self._map: mmap.mmap | None = None

    def __enter__(self) -> TraceWriter:
        check_target(self.path)
        with ExitStack() as stack:
            try:
                self._temporary = stack.enter_context(temporary_file(self.path))
                self._file = stack.enter_context(self._temporary.open("r+b", buffering=0))
            except OSError as error:
                raise unwritten(self.path, error, self._room) from None
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def add(self, name: str, rows: Array, axis: int = 0, shape: tuple[int, ...] | None = None, start: int = 0) -> None:
        """Write rows ``start`` onwards along ``axis`` of a tap that has ``shape`` in the end (default: these are all).

        The first call fixes shape and type. float32, float16, int32 and so on are kept as they come.
        """
        rows = np.ascontiguousarray(rows)
        kind = next((key for key, dtype in DTYPES.items() if dtype == rows.dtype and key != "BF16"), None)
        if kind is None:
            raise UserError(f"{name}: values of type {rows.dtype} cannot be stored in a trace; use float32")
        if name not in self._entries:
            self._entries[name] = (kind, shape or rows.shape, self._end)
            self._end += int(np.prod(shape or rows.shape)) * rows.itemsize
        else:
            self._check_room()  # every tap has been seen once
        self._write_rows(name, rows, axis, start)

    def mapped(self, name: str) -> tuple[str, Array] | None:
        """A tap that is complete as it stands in the file, and its type; None where the disk is full.

        The header must have room enough: it is too late to move what is looked at.
        """
        kind, shape, offset = self._entries[name]
        stop, file = self._room + offset + int(np.prod(shape)) * STORED[kind].itemsize, self._file.fileno()
        if self._full is not None:
            return None
        if not OPEN_FILES_MOVE:  # nor could it grow
            return kind, np.frombuffer(self._read_back(self._room + offset, stop), DTYPES[kind]).reshape(shape)
        if self._map is None or len(self._map) < stop:
            try:
                os.ftruncate(file, -(-os.fstat(file).st_size // _GROWTH) * _GROWTH)
                self._map = mmap.mmap(file, 0, access=mmap.ACCESS_READ)
            except OSError as error:
                raise unwritten(self.path, error) from None
        return kind, np.ndarray(shape, DTYPES[kind], self._map, self._room + offset)

    def attach(self, name: str, data: bytes) -> None:
        """Keep bytes beside the taps, under a name that is none of theirs: readers who do not know it pass it over."""
        self._entries[name] = ("U8", (len(data),), self._end)
        self._write(data, self._room + self._end)
        self._end += len(data)

    def _write_rows(self, name: str, rows: Array, axis: int, start: int) -> None:
        """The rows of ``axis`` are runs of the file, one for each index of the axes before it."""
        kind, shape, offset = self._entries[name]
        if rows.ndim != len(shape) or start + rows.shape[axis] > shape[axis]:
            raise UserError(f"{name}: rows {list(rows.shape)} do not fit a tap of shape {list(shape)}")
        padded = _pad_to(rows, shape, axis)
        if rows.shape == shape:
            self._write(rows, self._room + offset)
            return
        size = DTYPES[kind].itemsize
        inner = int(np.prod(shape[axis + 1 :])) * size
        for outer in range(int(np.prod(shape[:axis]))):
            place = offset + (outer * shape[axis] + start) * inner
            run = padded.reshape(-1, rows.shape[axis], *shape[axis + 1 :])[outer]
            self._write(np.ascontiguousarray(run), self._room + place)

    def _write(self, data: bytes | bytearray | Array, offset: int) -> None:
        view = data.reshape(-1).view(np.uint8).data if isinstance(data, np.ndarray) else memoryview(data)
        try:
            while view and self._full is None:
                self._file.seek(offset)
                written = os.write(self._file.fileno(), view)
                view, offset = view[written:], offset + written
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise unwritten(self.path, error) from None
            self._full = error

    def _read_back(self, start: int, stop: int) -> bytearray:
        """Bytes that were written."""
        data = bytearray(stop - start)
        self._file.seek(start)
        self._file.readinto(data)
        return data

    def _check_room(self) -> None:
        """Raise UserError if the disk was full: by now it is known how much is needed."""
        if self._full is not None:
            raise unwritten(self.path, self._full, self._room + self._end)

    def finish(self, info: Info) -> None:
        """Write the header and give the file its name."""
        self._check_room()
        header: dict[str, Any] = {"__metadata__": {KEY: info.to_json()}}
        for name, (kind, shape, offset) in self._entries.items():
            size = int(np.prod(shape)) * STORED[kind].itemsize
            header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, offset + size]}
        text = json.dumps(header, separators=(",", ":")).encode()
        if len(text) + 8 > self._room:
            self._move_data(-(-(len(text) + 8) // 4096) * 4096)
        self._write(struct.pack("<Q", self._room - 8) + text.ljust(self._room - 8), 0)
        self._check_room()
        try:
            os.ftruncate(self._file.fileno(), self._room + self._end)
            self._file.close()  # Windows renames no file that is open
            os.replace(self._temporary, os.path.realpath(self.path))
        except OSError as error:
            raise unwritten(self.path, error, self._room + self._end) from None

    def _move_data(self, room: int) -> None:
        """Make the header larger: move the data back, last part first."""
        step = 1 << 24
        for start in reversed(range(0, self._end, step)):
            self._write(self._read_back(self._room + start, self._room + min(start + step, self._end)), room + start)
        self._room = room


def restate(path: Path, info: Info) -> None:
    """Other words about the run of a trace's file; its tensors stay where they are, if the header has room for them.

    Meanwhile the file has another name: under its own it is there with one header or the other.
    """
    path = Path(os.path.realpath(path))  # a link stays one
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    header["__metadata__"][KEY] = info.to_json()
    text = json.dumps(header, separators=(",", ":")).encode()
    if len(text) > size:
        rewrite(Trace.open(path), info, path)
        return
    try:
        with move_aside(path) as place, place.open("r+b") as file:
            file.seek(8)
            file.write(text.ljust(size))
    except OSError as error:
        raise unwritten(path, error) from None


def rewrite(trace: Trace, info: Info, path: Path) -> None:
    """A trace's file anew, with other words about its run: complete under its name, or as it was."""
    kept = list(trace.attachments())
    with TraceWriter(path, len(trace) + len(kept)) as writer:
        for name in trace:
            writer.add(name, trace.stored(name))
        for name, data in kept:
            writer.attach(name, data)
        writer.finish(info)


def _pad_to(rows: Array, shape: tuple[int, ...], axis: int) -> Array:
    """Zeros up to the tap's shape on every axis but ``axis`` (a decode step's scores see fewer keys)."""
    pad = [(0, 0 if i == axis else want - have) for i, (have, want) in enumerate(zip(rows.shape, shape, strict=True))]
    return np.pad(rows, pad) if any(after for _, after in pad) else rows
