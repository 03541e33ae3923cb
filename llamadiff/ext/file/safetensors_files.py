"""Tensors of .safetensors files, one or sharded: headers checked, values mapped and read when they are wanted."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from llamadiff.ext.file.views import Stored
from llamadiff.system.errors import UserError
from llamadiff.system.input import check_regular
from llamadiff.trace.reader import DTYPES, MAX_AXES
from llamadiff.trace.stated import parse_json, reason

MAX_HEADER = 1 << 26  # bytes: 100,000 tensors take a fifth of it
MAX_INDEX = 1 << 26
MAX_SHARDS = 4096
MAX_NAME = 200  # characters of a file's
KINDS = {**DTYPES, "I8": np.dtype("i1"), "U8": np.dtype("u1"), "BOOL": np.dtype("?")}
INDEX = "model.safetensors.index.json"


def open_checkpoint(folder: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """The tensors of a directory, and those whose type is not read, with it. Raises UserError where there are none."""
    tensors, unread = dict[str, Stored](), dict[str, str]()
    for path in shards(folder):
        for name, found in tensors_of(path):
            if name in tensors or name in unread:
                raise UserError(f"{path}: {name[:80]} is in an earlier file of {folder.name} too; keep one of them")
            if isinstance(found, Stored):
                tensors[name] = found
            else:
                unread[name] = found
    return tensors, unread


def shards(folder: Path) -> list[Path]:
    """The .safetensors files of a checkpoint, by its index if it has one. Raises UserError for one that is missing."""
    index = folder / INDEX
    if index.is_file():
        return _indexed(folder, index)
    found = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("."))
    if not found:
        pickled = next(iter([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]), None)
        hint = f"{pickled.name} is pickled, which is never opened" if pickled else "it holds none"
        raise UserError(f"{folder}: no .safetensors weights ({hint}); save the model with save_pretrained")
    _check_complete(folder, found)
    return found


def _indexed(folder: Path, index: Path) -> list[Path]:
    if index.stat().st_size > MAX_INDEX:
        raise UserError(f"{index}: more than {MAX_INDEX >> 20} MiB; give the index of a checkpoint")
    try:
        stated = parse_json(index.read_bytes())
    except (ValueError, OSError) as error:
        raise UserError(f"{index}: is not JSON ({reason(error)}); download it anew") from None
    names = stated.get("weight_map") if isinstance(stated, dict) else None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise UserError(f'{index}: expected {{"weight_map": {{tensor: file}}}}; download it anew')
    files = sorted(set(names.values()))
    for name in files[:MAX_SHARDS]:
        if Path(name).name != name or len(name) > MAX_NAME or "\0" in name or not (folder / name).is_file():
            raise UserError(f"{folder}: the shard {name[:80]} that {INDEX} names is not there; download it")
    return [folder / name for name in files[:MAX_SHARDS]]


def _check_complete(folder: Path, found: list[Path]) -> None:
    """Raise UserError if names such as model-00002-of-00003.safetensors tell of a shard that is not there."""
    for path in found:
        head, of, count = path.stem.rpartition("-of-")
        if of and count.isdigit() and head[-5:].isdigit() and len(found) < int(count):
            raise UserError(f"{folder}: {len(found)} of {int(count)} shards are there; download the others")


def tensors_of(path: Path) -> Iterator[tuple[str, Stored | str]]:
    """Each tensor of a file, or the type that it has where that is not read."""
    check_regular(path, "a .safetensors file")
    header, start = _header(path)
    data = np.memmap(path, np.uint8, "r")
    for name, entry in header.items():
        if name != "__metadata__":
            yield name, _tensor(path, name, entry, data, start)


def _header(path: Path) -> tuple[Mapping[str, Any], int]:
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
            if size > MAX_HEADER:
                raise ValueError(f"it claims a header of {size} bytes")
            text = file.read(size)
            if len(text) < size or not size:
                raise ValueError(f"it ends within its header of {size} bytes")
            header = parse_json(text)
        if not isinstance(header, dict):
            raise ValueError("its header is no object")
    except (OSError, ValueError, json.JSONDecodeError) as error:
        raise UserError(f"{path}: not a readable .safetensors file ({reason(error)}); download it anew") from None
    return header, 8 + size


def _tensor(path: Path, name: str, entry: Any, data: Any, start: int) -> Stored | str:
    """One entry of a header, checked against the file."""
    try:
        kind, shape, (first, last) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
        if not all(type(n) is int and n >= 0 for n in (*shape, first, last)) or last < first:
            raise ValueError("negative or no whole numbers")
        if len(shape) > MAX_AXES:
            raise ValueError("too many axes")
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{path}: the entry of {name[:80]} is damaged; download the file anew") from None
    if start + last > data.size:
        raise UserError(
            f"{path}: ends at byte {data.size}, {name[:80]} needs {start + last}: it is truncated; download it anew"
        )
    if kind not in KINDS:
        return kind
    if prod(shape) * KINDS[kind].itemsize != last - first:
        raise UserError(f"{path}: {name[:80]} of shape {list(shape)} and type {kind} has {last - first} bytes")
    values = data[start + first : start + last]
    aligned = values if (start + first) % KINDS[kind].itemsize == 0 else np.array(values)
    return Stored(aligned.view(KINDS[kind]).reshape(shape), kind)
