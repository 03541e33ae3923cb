"""Traces: everything one run recorded, in one safetensors file. Written as a stream, read memory-mapped.

The file is the contract with other people's engines; captures/README.md states it for them.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, pairwise, takewhile
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.system.errors import UserError
from llamadiff.system.input import check_regular
from llamadiff.system.leftovers import temporary_file
from llamadiff.system.output import NO_ROOM, check_target, unwritten
from llamadiff.system.stated import MAX_DEPTH, brief, is_shallow, parse_json, reason
from llamadiff.trace import taps
from llamadiff.trace.printed import Printed

Array = NDArray[Any]

SCHEMA = "llamadiff.trace/1"
KEY = "llamadiff"
DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"), "F64": np.dtype("<f8"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"),
    "I32": np.dtype("<i4"), "I64": np.dtype("<i8"),
}  # fmt: skip
MAX_AXES = 8  # of a tensor in a trace; more than any engine has
MAX_ID = 1 << 31  # token ids and positions are 32-bit in llama.cpp
MAX_HEADER = 1 << 23  # bytes: 2,000 taps and as many tokens as any context has take a quarter of it
_HEADER_ROOM = 4096  # bytes of header set aside for the metadata; each tap takes about 100 more


@dataclass(frozen=True)
class Info:
    """What a trace says of its run. Only ``tokens`` is required of a stranger's trace.

    ``batches``: how many tokens were run at a time, where it was not ``n_prefill`` of them and then one by one.
    """

    tokens: tuple[int, ...]
    positions: tuple[int, ...] = ()
    n_prefill: int = 0
    prompt: str | None = None
    producer: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    batches: tuple[int, ...] = ()

    @property
    def edges(self) -> tuple[int, ...]:
        """The index of the token that each batch begins with, and how many tokens there are."""
        steps = range(self.n_prefill or len(self.tokens), len(self.tokens) + 1)
        return (0, *accumulate(self.batches)) if self.batches else (0, *steps)

    def head(self, n: int) -> Info:
        """What it says of its first ``n`` tokens."""
        kept = [edge for edge in (*self.edges, n) if edge <= n]
        batches = tuple(b - a for a, b in pairwise(dict.fromkeys(kept))) if self.batches else ()
        tokens, positions, n_prefill = self.tokens[:n], self.positions[:n], min(self.n_prefill, n)
        return replace(self, tokens=tokens, positions=positions, n_prefill=n_prefill, batches=batches)

    def to_json(self) -> str:
        said = asdict(self)
        if not self.batches:
            del said["batches"]
        return json.dumps({"schema": SCHEMA, **said})


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
        self._full: OSError | None = None  # the disk: what is added is counted, not written

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

    def _write_rows(self, name: str, rows: Array, axis: int, start: int) -> None:
        """The rows of ``axis`` are runs of the file, one for each index of the axes before it."""
        kind, shape, offset = self._entries[name]
        if rows.ndim != len(shape) or start + rows.shape[axis] > shape[axis]:
            raise UserError(f"{name}: rows {list(rows.shape)} do not fit a tap of shape {list(shape)}")
        padded = _grown(rows, shape, axis)
        if rows.shape == shape:
            self._pwrite(rows, self._room + offset)
            return
        size = DTYPES[kind].itemsize
        inner = int(np.prod(shape[axis + 1 :])) * size
        for outer in range(int(np.prod(shape[:axis]))):
            place = offset + (outer * shape[axis] + start) * inner
            run = padded.reshape(-1, rows.shape[axis], *shape[axis + 1 :])[outer]
            self._pwrite(np.ascontiguousarray(run), self._room + place)

    def _pwrite(self, data: bytes | Array, offset: int) -> None:
        view = data.reshape(-1).view(np.uint8).data if isinstance(data, np.ndarray) else memoryview(data)
        try:
            while view and self._full is None:
                written = os.pwrite(self._file.fileno(), view, offset)
                view, offset = view[written:], offset + written
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise unwritten(self.path, error) from None
            self._full = error
            os.ftruncate(self._file.fileno(), 0)

    def _check_room(self) -> None:
        """Raise UserError if the disk was full: by now it is known how much is needed."""
        if self._full is not None:
            raise unwritten(self.path, self._full, self._room + self._end)

    def finish(self, info: Info) -> None:
        """Write the header and give the file its name."""
        self._check_room()
        header: dict[str, Any] = {"__metadata__": {KEY: info.to_json()}}
        for name, (kind, shape, offset) in self._entries.items():
            size = int(np.prod(shape)) * DTYPES[kind].itemsize
            header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, offset + size]}
        text = json.dumps(header, separators=(",", ":")).encode()
        if len(text) + 8 > self._room:
            self._move_data(-(-(len(text) + 8) // 4096) * 4096)
        self._pwrite(struct.pack("<Q", self._room - 8) + text.ljust(self._room - 8), 0)
        self._check_room()
        try:
            os.ftruncate(self._file.fileno(), self._room + self._end)
            os.replace(self._temporary, os.path.realpath(self.path))
        except OSError as error:
            raise unwritten(self.path, error, self._room + self._end) from None

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

    def __init__(
        self,
        info: Info,
        arrays: Mapping[str, Array],
        dtypes: Mapping[str, str],
        path: Path | None = None,
        known: Mapping[str, Array] | None = None,
        kept: Mapping[str, str] | None = None,
        printed: Printed | None = None,
    ) -> None:
        """``known`` marks the values of partial taps that are there; the others are zero and mean nothing.

        ``kept``: the precisions (``bf16``) that taps had before something was undone in them. ``printed``: what there
        is besides, of a run that was read from a log.
        """
        self.info = info
        self.path = path
        self.dtypes = dtypes
        self.known = known or {}
        self.kept = kept or {}
        self.printed = printed or Printed()
        self._arrays = arrays

    def __getitem__(self, name: str) -> Array:
        array = self._arrays[name]
        return _widened(array) if self.dtypes.get(name) == "BF16" else array

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def in_memory(self) -> Trace:
        """A copy that no longer needs its file."""
        arrays = {name: np.array(array) for name, array in self._arrays.items()}
        return Trace(self.info, arrays, self.dtypes, None, self.known, self.kept, self.printed)

    def saying(self, info: Info) -> Trace:
        """The same values with other words about their run."""
        n = len(info.tokens)
        arrays = {name: array.reshape(_without_batch(name, array.shape, n)) for name, array in self._arrays.items()}
        return Trace(info, arrays, self.dtypes, self.path, self.known, self.kept, self.printed)

    def lacking(self, names: Collection[str]) -> Trace:
        """The same run as if some taps had not been recorded."""
        arrays = {name: array for name, array in self._arrays.items() if name not in names}
        known = {name: mask for name, mask in self.known.items() if name not in names}
        return Trace(self.info, arrays, self.dtypes, self.path, known, self.kept, self.printed)

    def head(self, n: int) -> Trace:
        """What it recorded of its first ``n`` tokens; taps without any, or of other shapes, are left out."""
        cuts = {name: _cut(name, self.shape(name), len(self.info.tokens), n) for name in self}
        known = {name: mask[cuts[name]] for name, mask in self.known.items() if cuts.get(name) is not None}
        there = [name for name in self if cuts[name] is not None and (name not in known or known[name].any())]
        arrays = {name: self._arrays[name][cuts[name]] for name in there}
        kinds, slack = {name: self.dtypes[name] for name in arrays}, self.printed.slack
        printed = replace(self.printed, slack={name: slack[name][cuts[name]] for name in slack if name in arrays})
        return Trace(self.info.head(n), arrays, kinds, self.path, known, self.kept, printed)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._arrays[name].shape)

    def stored(self, name: str) -> Array:
        """A tap's values as the file keeps them: bfloat16 is not widened."""
        return self._arrays[name]

    def forget(self, names: Iterable[str]) -> None:
        """Let go of the pages of these taps that were read: they stay in the file, and out of this process."""
        for name in names:
            array = self._arrays.get(name)
            base = _mapping(array) if array is not None else None
            if array is not None and base is not None and hasattr(mmap, "MADV_DONTNEED"):
                start = array.ctypes.data - np.frombuffer(base, np.uint8, 1).ctypes.data
                first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
                if start + array.nbytes > first:
                    base.madvise(mmap.MADV_DONTNEED, first, start + array.nbytes - first)

    @classmethod
    def open(cls, path: str | Path, bare: bool = False) -> Trace:
        """Map a trace file. ``bare``: it may lack the metadata; then it states no tokens."""
        path = Path(path)
        header, start = _read_header(path)
        metadata = header.pop("__metadata__", {})
        text = metadata.get(KEY) if isinstance(metadata, dict) else None
        info = Info(()) if text is None and bare else _parse_info(path, text)
        whole = np.memmap(path, np.uint8, "r")  # one for all taps: every map keeps a file descriptor
        arrays: dict[str, Array] = {}
        dtypes: dict[str, str] = {}
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"][0]):
            if _is_readable(path, name, entry["dtype"], entry["shape"]):
                first, last = entry["data_offsets"]
                values = whole[start + first : start + last].view(DTYPES[entry["dtype"]])
                shape = _without_batch(name, entry["shape"], len(info.tokens))
                arrays[name], dtypes[name] = values.reshape(shape), entry["dtype"]
        return cls(info, arrays, dtypes, path)


def _cut(name: str, shape: tuple[int, ...], tokens: int, n: int) -> tuple[slice, ...] | None:
    """The first ``n`` tokens along each axis of a tap that runs over tokens; None if one has another length."""
    tap = taps.parse(name)
    along = [axis in ("token", "query", "key") for axis in tap.kind.axes] if tap is not None else []
    if not along or len(shape) < len(along) or any(over and shape[i] != tokens for i, over in enumerate(along)):
        return None
    return tuple(slice(n) if over else slice(None) for over in along)


def _mapping(array: Array) -> mmap.mmap | None:
    """The map of a file that an array looks into."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, mmap.mmap) else None


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header, after safetensors itself has checked names, types, sizes and offsets; and where data starts."""
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        raise UserError(f"{path}: no such trace")
    check_regular(path, "a .safetensors trace, which is mapped into memory")
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8).ljust(8))
            if size > MAX_HEADER:
                raise ValueError(f"it claims a header of {size} bytes")
            header = parse_json(file.read(size))
        with safe_open(str(path), "np"):
            pass
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path}: not a readable trace ({reason(error)}); write it as .safetensors") from None
    return header, 8 + size


def _is_readable(path: Path, name: str, dtype: str, shape: list[int]) -> bool:
    """Whether an entry holds values: a tap must, or UserError is raised; what is no tap is left out if it does not."""
    tap = taps.parse(name)
    if tap is None:
        return dtype in DTYPES and 0 not in shape and len(shape) <= MAX_AXES
    if dtype not in DTYPES:
        raise UserError(f"{path}: {name} has type {dtype}; a trace holds {', '.join(DTYPES)}")
    if 0 in shape or not tap.row_axis < len(shape) <= MAX_AXES:
        raise UserError(f"{path}: {name} has shape {shape}; its axes are {', '.join(tap.kind.axes)}")
    return True


def _without_batch(name: str, shape: Sequence[int], n_tokens: int) -> Sequence[int]:
    """A tap's shape without a batch of one before it, where its rows are then as many as the tokens."""
    tap = taps.parse(name)
    if tap is None or len(shape) < tap.row_axis + 2 or shape[0] != 1 or shape[tap.row_axis + 1] != n_tokens:
        return shape
    return shape[1:] if len(shape) > len(tap.kind.axes) or shape[tap.row_axis] != n_tokens else shape


def _parse_info(path: Path, text: Any) -> Info:
    if not isinstance(text, str):
        raise UserError(f"{path}: no {KEY!r} entry in __metadata__; it must hold the token ids (captures/README.md)")
    try:
        data = parse_json(text)
    except ValueError as error:
        raise UserError(f"{path}: the {KEY!r} metadata is not JSON ({reason(error)})") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else data
        raise UserError(f"{path}: schema is {brief(found)}; this version reads {SCHEMA!r}")
    data = _without_nulls(data)
    _check_kinds(path, data)
    tokens = tuple(data.get("tokens", ()))
    if not tokens:
        raise UserError(f"{path}: the trace has no tokens")
    positions = tuple(data.get("positions", range(len(tokens))))
    if len(positions) != len(tokens):
        raise UserError(f"{path}: {len(positions)} positions for {len(tokens)} tokens")
    batches = tuple(data.get("batches", ()))
    if batches and sum(batches) != len(tokens):
        raise UserError(f"{path}: batches of {sum(batches)} tokens in all for {len(tokens)} tokens")
    n_prefill = data.get("n_prefill", _prefill_of(batches) or len(tokens))
    if not 0 < n_prefill <= len(tokens):
        raise UserError(f"{path}: n_prefill = {n_prefill} for {len(tokens)} tokens; it must be 1 to {len(tokens)}")
    about = data.get("producer", {}), data.get("model", {})
    return Info(tokens, positions, n_prefill, data.get("prompt"), *about, batches)


def _prefill_of(batches: tuple[int, ...]) -> int:
    """The tokens before the last batches of one: what decode steps look like."""
    steps = sum(1 for _ in takewhile(lambda size: size == 1, reversed(batches[1:])))
    return sum(batches[: len(batches) - steps])


def _check_kinds(path: Path, data: dict[str, Any]) -> None:
    for place, (fits, words) in _KINDS.items():
        value: Any = data
        for key in place.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None and not fits(value):
            raise UserError(f"{path}: {place} in the metadata is {brief(value)}; it must be {words}")


def _without_nulls(data: dict[str, Any]) -> dict[str, Any]:
    """Null says no more than a missing key: left out, also within objects one level down."""
    kept = {key: value for key, value in data.items() if value is not None}
    return {
        key: {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value
        for key, value in kept.items()
    }


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return type(value) is int  # True is none


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < MAX_ID for item in value)


def _are_sizes(value: Any) -> bool:
    return _are_ids(value) and 0 not in value


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict) and is_shallow(value, MAX_DEPTH)


# What the metadata may say, by place: how it is tested, and in words. Anything else is kept as it comes.
_KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "tokens": (_are_ids, "a list of whole numbers"),
    "positions": (_are_ids, "a list of whole numbers"),
    "n_prefill": (_is_count, "a whole number"),
    "batches": (_are_sizes, "a list of whole numbers from 1 on"),
    "prompt": (_is_text, "text"),
    "model": (_is_object, "an object"),
    "model.sha256": (_is_text, "text"),
    "model.architecture": (_is_text, "text"),
    "model.file": (_is_text, "text"),
    "producer": (_is_object, "an object"),
    "producer.name": (_is_text, "text"),
    "producer.version": (_is_text, "text"),
    "producer.settings": (_is_object, "an object"),
    "producer.settings.type_k": (_is_text, "text"),
    "producer.settings.type_v": (_is_text, "text"),
    "producer.settings.flash_attn": (_is_flag, "true or false"),
    "producer.weights_read": (_are_texts, "a list of names"),
    "producer.asked": (_is_object, "an object"),
}


def _widened(bits: Array) -> Array:
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)
