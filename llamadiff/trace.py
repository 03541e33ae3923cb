"""Traces: everything one run recorded, in one safetensors file. Written as a stream, read memory-mapped.

The file is the contract with other people's engines; captures/README.md states it for them.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.errors import UserError

Array = NDArray[Any]

SCHEMA = "llamadiff.trace/1"
KEY = "llamadiff"
DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"), "F64": np.dtype("<f8"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"),
    "I32": np.dtype("<i4"), "I64": np.dtype("<i8"),
}  # fmt: skip
_HEADER_ROOM = 4096  # bytes of header set aside for the metadata; each tap takes about 100 more


@dataclass(frozen=True)
class Info:
    """What a trace says of its run. Only ``tokens`` is required of a stranger's trace."""

    tokens: tuple[int, ...]
    positions: tuple[int, ...] = ()
    n_prefill: int = 0
    prompt: str | None = None
    producer: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps({"schema": SCHEMA, **asdict(self)})


def temporary_name(path: Path, pid: int) -> Path:
    """Where process ``pid`` keeps a trace until it is complete: whoever outlives the process can remove it."""
    return path.with_name(f".{path.name}.{pid}.part")


class TraceWriter:
    """Writes a trace tap by tap; the file appears under its name when it is complete, or not at all.

    Use as a context manager. ``rows`` of a tap may arrive in several calls (a prefill, then decode steps).
    """

    def __init__(self, path: str | Path, expected_taps: int = 1000) -> None:
        self.path = Path(path)
        self._room = _HEADER_ROOM + 160 * expected_taps
        self._entries: dict[str, tuple[str, tuple[int, ...], int]] = {}  # name -> dtype, shape, offset
        self._end = 0
        self._file: Any = None

    def __enter__(self) -> TraceWriter:
        self._temporary = temporary_name(self.path, os.getpid())
        try:
            self._file = self._temporary.open("w+b", buffering=0)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written ({error.strerror})") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
        self._temporary.unlink(missing_ok=True)

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
        self._write_rows(name, rows, axis, start)

    def _write_rows(self, name: str, rows: Array, axis: int, start: int) -> None:
        """The rows of ``axis`` are runs of the file, one for each index of the axes before it."""
        kind, shape, offset = self._entries[name]
        if rows.ndim != len(shape) or start + rows.shape[axis] > shape[axis]:
            raise UserError(f"{name}: rows {list(rows.shape)} do not fit a tap of shape {list(shape)}")
        padded = _grown(rows, shape, axis)
        size = DTYPES[kind].itemsize
        inner = int(np.prod(shape[axis + 1 :])) * size
        for outer in range(int(np.prod(shape[:axis]))):
            place = offset + (outer * shape[axis] + start) * inner
            run = padded.reshape(-1, rows.shape[axis], *shape[axis + 1 :])[outer]
            self._pwrite(np.ascontiguousarray(run).tobytes(), self._room + place)

    def _pwrite(self, data: bytes, offset: int) -> None:
        view = memoryview(data)
        try:
            while view:
                written = os.pwrite(self._file.fileno(), view, offset)
                view, offset = view[written:], offset + written
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written ({error.strerror})") from None

    def finish(self, info: Info) -> None:
        """Write the header and give the file its name."""
        header: dict[str, Any] = {"__metadata__": {KEY: info.to_json()}}
        for name, (kind, shape, offset) in self._entries.items():
            size = int(np.prod(shape)) * DTYPES[kind].itemsize
            header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, offset + size]}
        text = json.dumps(header, separators=(",", ":")).encode()
        if len(text) + 8 > self._room:
            self._move_data(-(-(len(text) + 8) // 4096) * 4096)
        self._pwrite(struct.pack("<Q", self._room - 8) + text.ljust(self._room - 8), 0)
        try:
            os.ftruncate(self._file.fileno(), self._room + self._end)
            os.replace(self._temporary, self.path)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written ({error.strerror})") from None

    def _move_data(self, room: int) -> None:
        """Make the header larger: move the data back, last part first."""
        step = 1 << 24
        for start in reversed(range(0, self._end, step)):
            part = os.pread(self._file.fileno(), min(step, self._end - start), self._room + start)
            self._pwrite(part, room + start)
        self._room = room


def _grown(rows: Array, shape: tuple[int, ...], axis: int) -> Array:
    """Zeros up to the tap's shape on every axis but ``axis`` (a decode step's scores see fewer keys)."""
    pad = [(0, 0 if i == axis else want - have) for i, (have, want) in enumerate(zip(rows.shape, shape, strict=True))]
    return np.pad(rows, pad) if any(after for _, after in pad) else rows


class Trace(Mapping[str, Array]):
    """A recorded run: tap name -> array, memory-mapped and read-only, bfloat16 widened to float32.

    ``open`` validates the file; raises UserError in one line for whatever is wrong with it.
    """

    def __init__(self, info: Info, arrays: Mapping[str, Array], dtypes: Mapping[str, str], path: Path | None = None):
        self.info = info
        self.path = path
        self.dtypes = dtypes
        self._arrays = arrays

    def __getitem__(self, name: str) -> Array:
        array = self._arrays[name]
        return _widened(array) if self.dtypes.get(name) == "BF16" else array

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._arrays[name].shape)

    @classmethod
    def open(cls, path: str | Path) -> Trace:
        path = Path(path)
        header, start = _read_header(path)
        metadata = header.pop("__metadata__", {})
        info = _parse_info(path, metadata.get(KEY) if isinstance(metadata, dict) else None)
        arrays: dict[str, Array] = {}
        dtypes: dict[str, str] = {}
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"][0]):
            if entry["dtype"] not in DTYPES:
                raise UserError(f"{path}: {name} has type {entry['dtype']}; a trace holds {', '.join(DTYPES)}")
            dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
            offset = start + entry["data_offsets"][0]
            empty = 0 in shape
            arrays[name] = np.zeros(shape, dtype) if empty else np.memmap(path, dtype, "r", offset, shape)
            dtypes[name] = entry["dtype"]
        return cls(info, arrays, dtypes, path)


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header, after safetensors itself has checked names, types, sizes and offsets; and where data starts."""
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        raise UserError(f"{path}: no such trace")
    if path.is_dir():
        raise UserError(f"{path}: is a directory; give the .safetensors trace in it")
    try:
        with safe_open(str(path), "np"):
            pass
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
    except (SafetensorError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: not a readable trace ({reason[:120]}); write it as .safetensors") from None
    return header, 8 + size


def _parse_info(path: Path, text: Any) -> Info:
    if not isinstance(text, str):
        raise UserError(f"{path}: no {KEY!r} entry in __metadata__; it must hold the token ids (captures/README.md)")
    try:
        data = json.loads(text)
    except ValueError as error:
        raise UserError(f"{path}: the {KEY!r} metadata is not JSON ({error})") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else data
        raise UserError(f"{path}: schema is {found!r}; this version reads {SCHEMA!r}")
    tokens = _whole_numbers(path, "tokens", data.get("tokens"))
    if not tokens:
        raise UserError(f"{path}: the trace has no tokens")
    positions = _whole_numbers(path, "positions", data.get("positions") or list(range(len(tokens))))
    if len(positions) != len(tokens):
        raise UserError(f"{path}: {len(positions)} positions for {len(tokens)} tokens")
    producer, model = data.get("producer") or {}, data.get("model") or {}
    n_prefill = data.get("n_prefill") or len(tokens)
    valid = isinstance(producer, dict) and isinstance(model, dict) and isinstance(n_prefill, int)
    if not valid or not 0 < n_prefill <= len(tokens):
        raise UserError(f"{path}: producer, model or n_prefill in the metadata is not what captures/README.md says")
    prompt = data.get("prompt")
    return Info(tokens, positions, n_prefill, prompt if isinstance(prompt, str) else None, producer, model)


def _whole_numbers(path: Path, key: str, value: Any) -> tuple[int, ...]:
    good = isinstance(value, list) and all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in value)
    if not good:
        raise UserError(f"{path}: {key} in the metadata must be a list of whole numbers")
    return tuple(value)


def _widened(bits: Array) -> Array:
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)
