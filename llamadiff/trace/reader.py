"""Traces: everything one run recorded, in one safetensors file. Written as a stream, read memory-mapped.

The file is the contract with other people's engines; docs/trace-format.md states it for them.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff import plugins
from llamadiff.system.errors import UserError
from llamadiff.system.input import check_regular
from llamadiff.system.pages import let_go
from llamadiff.trace import taps
from llamadiff.trace.metadata import KEY, Info, parse_info
from llamadiff.trace.sketch import TENSOR, Sketch, read_sketch
from llamadiff.trace.stated import parse_json, reason

Array = NDArray[Any]

DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"), "F64": np.dtype("<f8"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"),
    "I32": np.dtype("<i4"), "I64": np.dtype("<i8"),
}  # fmt: skip
MAX_AXES = 8  # of a tensor in a trace; more than any engine has
MAX_HEADER = 1 << 23  # bytes: 2,000 taps and as many tokens as any context has take a quarter of it


@dataclass(frozen=True)
class Number:
    """A printed number; ``slack`` is half a unit of its last digit: it may have been rounded by so much."""

    value: float
    slack: float


@dataclass(frozen=True)
class Printed:
    """What is known of a candidate that was read from a log, or told by a server, besides its values.

    ``slack``: by tap, how far each value may have been rounded; ``stated``: by tap, its statistics (rms, mean, min,
    max, norm); ``relative``: taps of which each row is known up to a constant; ``notes``: how it was read, in words;
    ``faults``: what is wrong before any op; ``joined``: what a slice knows of taps that it put together of parts.
    """

    slack: Mapping[str, Array] = field(default_factory=dict)
    stated: Mapping[str, Mapping[str, Number]] = field(default_factory=dict)
    relative: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    joined: Mapping[str, Any] = field(default_factory=dict)


class Trace(Mapping[str, Array]):
    """A recorded run: tap name -> array, memory-mapped and read-only, bfloat16 widened to float32.

    ``open`` validates the file; raises UserError in one line for whatever is wrong with it.
    """

    is_float32 = False  # whether all values are known to be in full precision, without a look at them

    def __init__(
        self,
        info: Info,
        arrays: Mapping[str, Array],
        dtypes: Mapping[str, str],
        path: Path | None = None,
        known: Mapping[str, Array] | None = None,
        kept: Mapping[str, str] | None = None,
        printed: Printed | None = None,
        sketch: Sketch | None = None,
    ) -> None:
        """``known`` marks the values of partial taps that are there; the others are zero and mean nothing.

        ``kept``: the precisions (``bf16``) that taps had before something was undone in them. ``printed``: what there
        is besides, of a run that was read from a log. ``sketch``: what there is of taps whose tensors were not kept.
        """
        self.info = info
        self.path = path
        self.dtypes = dtypes
        self.known = known or {}
        self.kept = kept or {}
        self.printed = printed or Printed()
        self.sketch = sketch
        none = {name for name, mask in self.known.items() if not mask.any()}  # nothing known: it was not recorded
        self._arrays = {name: arrays[name] for name in arrays if name not in none} if none else arrays

    def under(self, info: Info) -> Trace:
        """The same tensors, of a run that is described otherwise."""
        return Trace(info, self._arrays, self.dtypes, self.path, self.known, self.kept, self.printed, self.sketch)

    def __getitem__(self, name: str) -> Array:
        array = self._arrays[name]
        return _widen(array) if self.dtypes.get(name) == "BF16" else array

    def __contains__(self, name: object) -> bool:
        return name in self._arrays

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def in_memory(self) -> Trace:
        """A copy that no longer needs its file."""
        arrays = {name: np.array(array) for name, array in self._arrays.items()}
        return Trace(self.info, arrays, self.dtypes, None, self.known, self.kept, self.printed, self.sketch)

    def saying(self, info: Info) -> Trace:
        """The same values with other words about their run."""
        n = len(info.tokens)
        arrays = {name: array.reshape(_without_batch(name, array.shape, n)) for name, array in self._arrays.items()}
        return Trace(info, arrays, self.dtypes, self.path, self.known, self.kept, self.printed, self.sketch)

    def lacking(self, names: Collection[str]) -> Trace:
        """The same run as if some taps had not been recorded."""
        arrays = {name: array for name, array in self._arrays.items() if name not in names}
        known = {name: mask for name, mask in self.known.items() if name not in names}
        return Trace(self.info, arrays, self.dtypes, self.path, known, self.kept, self.printed, self.sketch)

    def with_settings(self, **settings: str) -> Trace:
        """The same run of an engine that says this of its settings."""
        stated = self.info.producer.get("settings")
        own = {**(stated if isinstance(stated, dict) else {}), **settings}
        info = replace(self.info, producer={**self.info.producer, "settings": own})
        return Trace(info, self._arrays, self.dtypes, self.path, self.known, self.kept, self.printed, self.sketch)

    def head(self, n: int, names: Sequence[str] | None = None) -> Trace:
        """What it recorded of its first ``n`` tokens; taps without any, or of other shapes, are left out.

        Of these taps alone, if they are named.
        """
        names = [name for name in names if name in self] if names is not None else list(self)
        cuts = {name: _token_slices(name, self.shape(name), len(self.info.tokens), n) for name in names}
        known = {name: mask[cuts[name]] for name, mask in self.known.items() if cuts.get(name) is not None}
        arrays = {name: self._arrays[name][cuts[name]] for name in names if cuts[name] is not None}
        kinds, slack = {name: self.dtypes[name] for name in arrays}, self.printed.slack
        printed = replace(self.printed, slack={name: slack[name][cuts[name]] for name in slack if name in arrays})
        return Trace(self.info.head(n), arrays, kinds, self.path, known, self.kept, printed)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._arrays[name].shape)

    def attached(self, name: str) -> bytes | None:
        """Bytes that the file keeps beside the taps; None if there are none of this name."""
        return next((data for found, data in self.attachments() if found == name), None)

    def attachments(self) -> Iterator[tuple[str, bytes]]:
        """All that the file keeps beside the taps, by name."""
        if self.path is None or self.path.suffix != ".safetensors" or not self.path.is_file():
            return
        header, start = _read_header(self.path)
        with self.path.open("rb") as file:
            for name, entry in header.items():
                if entry.get("dtype") == "U8":
                    first, last = entry["data_offsets"]
                    file.seek(start + first)
                    yield name, file.read(last - first)

    def stored(self, name: str) -> Array:
        """A tap's values as the file keeps them: bfloat16 is not widened."""
        return self._arrays[name]

    def forget(self, names: Iterable[str]) -> None:
        """Let go of the pages of these taps that were read: they stay in the file, and out of this process."""
        for name in names:
            if name in self._arrays:
                let_go(self._arrays[name])

    def wait(self) -> None:
        """Return when all of it is recorded, and all is known of its run: here it is."""

    @classmethod
    def open(cls, path: str | Path, bare: bool = False) -> Trace:
        """Map a trace file. ``bare``: it may lack the metadata; then it states no tokens."""
        path = Path(path)
        header, start = _read_header(path)
        metadata = header.pop("__metadata__", {})
        text = metadata.get(KEY) if isinstance(metadata, dict) else None
        if text is None and not bare:
            _refuse_mistaken(path)
        info = Info(()) if text is None and bare else parse_info(path, text)
        whole = np.memmap(path, np.uint8, "r")  # one for all taps: every map keeps a file descriptor
        arrays: dict[str, Array] = {}
        dtypes: dict[str, str] = {}
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"][0]):
            if _is_readable(path, name, entry["dtype"], entry["shape"]):
                first, last = entry["data_offsets"]
                values = whole[start + first : start + last].view(DTYPES[entry["dtype"]])
                shape = _without_batch(name, entry["shape"], len(info.tokens))
                arrays[name], dtypes[name] = values.reshape(shape), entry["dtype"]
        if info.sketch:
            return cls(info, {}, {}, path, sketch=read_sketch(path, info, arrays.get(TENSOR)))
        return cls(info, arrays, dtypes, path)


def _token_slices(name: str, shape: tuple[int, ...], tokens: int, n: int) -> tuple[slice, ...] | None:
    """The first ``n`` tokens along each axis of a tap that runs over tokens; None if one has another length."""
    tap = taps.parse(name)
    along = [axis in ("token", "query", "key") for axis in tap.kind.axes] if tap is not None else []
    if not along or len(shape) < len(along) or any(over and shape[i] != tokens for i, over in enumerate(along)):
        return None
    return tuple(slice(n) if over else slice(None) for over in along)


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header, after safetensors itself has checked names, types, sizes and offsets; and where data starts."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        _refuse_mistaken(path)
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
        _refuse_mistaken(path)
        raise UserError(f"{path}: not a readable trace ({reason(error)}); write it as .safetensors") from None
    return header, 8 + size


def _refuse_mistaken(path: Path) -> None:
    """Raise UserError for what is no trace, where a slice knows what it is."""
    if said := plugins.ask_first(lambda each: each.mistake(path, "trace")):
        raise UserError(said)


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


def _widen(bits: Array) -> Array:
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)
