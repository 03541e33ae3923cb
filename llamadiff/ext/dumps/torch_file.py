"""Tensors of a .pt file as ``torch.save`` writes it: an archive of storages, and a pickle that is read as data."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.candidates.arrays import checked_shape
from llamadiff.candidates.pieces import Unread, named_row
from llamadiff.ext.dumps.pickled import MAX_BYTES, Call, Name, PickleError, Stored, items_of, read_pickle
from llamadiff.system.errors import UserError
from llamadiff.system.input import check_regular
from llamadiff.trace.stated import reason

Array = NDArray[Any]

ENDINGS = (".pt", ".pth")
MAX_MEMBERS = 1 << 17
AGAIN = "write it with torch.save(tensors, path), a tensor or a dict of them"
_HEADER = 30  # bytes of a zip member's own header, before its name
_REBUILD = "torch._utils._rebuild_"
_PARAMETERS = (f"{_REBUILD}parameter", f"{_REBUILD}parameter_with_state")

# dtype -> how NumPy has its bits; what NumPy lacks is widened by ``_WIDENED``
_TYPES = {
    "float64": "<f8", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "int64": "<i8", "int32": "<i4",
    "int16": "<i2", "int8": "i1", "uint8": "u1", "bool": "u1", "uint16": "<u2", "uint32": "<u4", "uint64": "<u8",
    "float8_e4m3fn": "u1", "float8_e5m2": "u1", "float8_e4m3fnuz": "u1", "float8_e5m2fnuz": "u1",
}  # fmt: skip
_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "UntypedStorage": "uint8",
}  # fmt: skip
_FLOAT8 = {  # bits of the mantissa, the exponent's bias
    "float8_e4m3fn": (3, 7), "float8_e5m2": (2, 15), "float8_e4m3fnuz": (3, 8), "float8_e5m2fnuz": (2, 16),
}  # fmt: skip


@dataclass(frozen=True)
class _Place:
    """Where a tensor's values lie: in a member of the archive, from an element on, so far apart along each axis."""

    path: Path
    member: zipfile.ZipInfo
    dtype: str
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def kind(self) -> np.dtype[Any]:
        return np.dtype(_TYPES[self.dtype])

    @property
    def reach(self) -> int:
        """Elements from the first to the last."""
        inside = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))
        return inside if all(self.shape) else 0

    def read(self, most: int) -> tuple[Array, None]:
        """Its values, no more than so many; floats as float32."""
        if math.prod(self.shape) > most:
            raise UserError(f"{self.path}: a tensor of shape {list(self.shape)}, where {most} values are to be had")
        size = self.kind.itemsize
        try:
            with self.path.open("rb") as file:
                file.seek(self.member.header_offset)
                head = file.read(_HEADER)
                names = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
                file.seek(names + self.start * size, 1)
                data = file.read(self.reach * size)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read ({error.strerror})") from None
        if len(data) != self.reach * size:
            raise UserError(f"{self.path}: is cut off within {self.member.filename[:60]}; {AGAIN}")
        flat = np.frombuffer(data, self.kind)
        strides = tuple(step * size for step in self.strides)
        view = np.lib.stride_tricks.as_strided(flat, self.shape, strides, writeable=False) if flat.size else flat
        return widened(np.ascontiguousarray(view).reshape(self.shape), self.dtype), None


def widened(values: Array, dtype: str) -> Array:
    """Values of a type of torch's as float32; whole numbers as they are."""
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    if dtype in _FLOAT8:
        return _float8(dtype)[values]
    with np.errstate(all="ignore"):  # what float32 cannot hold is infinite
        return values.astype(np.int64 if values.dtype.kind in "iu" else np.float32)


@lru_cache(maxsize=8)
def _float8(dtype: str) -> Array:
    """The value of each of the 256 bit patterns of a type of 8 bits."""
    mantissa, bias = _FLOAT8[dtype]
    bits = np.arange(256)
    exponent, rest = (bits & 127) >> mantissa, (bits & ((1 << mantissa) - 1)) / (1 << mantissa)
    size = np.where(exponent > 0, (1 + rest) * 2.0 ** (exponent - bias), rest * 2.0 ** (1 - bias))
    values = np.where(bits < 128, size, -size)
    if dtype.endswith("uz"):  # no Inf, no negative zero: its pattern is NaN
        values[128] = np.nan
    elif dtype == "float8_e5m2":
        values = np.where(exponent < 31, values, np.where(rest == 0, np.copysign(np.inf, values), np.nan))
    else:
        values[[127, 255]] = np.nan
    return values.astype(np.float32)


def tensors_of(path: Path) -> list[Unread]:
    """The tensors of a .pt file, by the keys and places of the dicts and lists around them; of one alone, no name.

    Raises UserError for what ``torch.save`` does not write of tensors, dicts and lists.
    """
    check_regular(path, "a .pt file")
    try:
        members, program = _opened(path)
        found = ((name, _place(path, members, value)) for name, value in items_of(read_pickle(program, _is_inert)))
        return [Unread(*named_row(name), place.shape, place.read) for name, place in found if place is not None]
    except PickleError as error:
        raise UserError(f"{path}: {error}; {AGAIN}") from None


def _is_inert(name: str) -> bool:
    """Whether a call is written down: torch's own, of which tensors are looked at."""
    return name.startswith("torch.")


def _opened(path: Path) -> tuple[Mapping[str, zipfile.ZipInfo], bytes]:
    """The archive's members by their names in its folder, and its pickle. Raises PickleError for other forms."""
    try:
        with path.open("rb") as file:
            if file.read(1) == b"\x80":
                raise PickleError("is a pickle of the old form, which torch 1.6 replaced by an archive")
        with zipfile.ZipFile(path) as archive:
            members = _members(archive.infolist())
            if members["data.pkl"].file_size > MAX_BYTES:
                raise PickleError(f"its pickle has more than {MAX_BYTES} bytes")
            program = archive.read(members["data.pkl"])
            order = archive.read(members["byteorder"]) if "byteorder" in members else b"little"
    except PickleError:
        raise
    except Exception as error:  # zipfile raises many kinds
        raise PickleError(f"is no archive of torch.save ({reason(error)}), or not all of one") from None
    if order != b"little":
        raise PickleError("has its values in big-endian order, which is not read")
    return members, program


def _members(infos: list[zipfile.ZipInfo]) -> Mapping[str, zipfile.ZipInfo]:
    """The members of the folder that the pickle lies in, by name. Raises PickleError where there is none."""
    names = [info.filename for info in infos]
    if len(names) > MAX_MEMBERS or len(set(names)) < len(names):
        raise PickleError(f"has {len(names)} members, or two of one name")
    folder = next((name.removesuffix("data.pkl") for name in names if name.endswith("/data.pkl")), None)
    if folder is None or any(name.startswith(f"{folder}code/") for name in names):
        raise PickleError("is a program (TorchScript) or another archive, and holds no tensors that were saved")
    return {info.filename.removeprefix(folder): info for info in infos if info.filename.startswith(folder)}


def _place(path: Path, members: Mapping[str, zipfile.ZipInfo], value: Any) -> _Place | None:
    """Where the values of a tensor lie; None of what is none. Raises PickleError for one that does not fit its file."""
    while isinstance(value, Call) and value.name in _PARAMETERS and value.arguments:
        value = value.arguments[0]
    if not isinstance(value, Call) or value.name not in (f"{_REBUILD}tensor_v2", f"{_REBUILD}tensor_v3"):
        return None
    try:
        stored, start, shape, strides = value.arguments[:4]
        _, storage, key, *_ = stored.about if isinstance(stored, Stored) else ()
        kind = value.arguments[6] if value.name.endswith("v3") else storage
        dtype = _dtype(kind.name if isinstance(kind, Name) else "")
        checked_shape(str(path), strides)
        where = _Place(path, members[f"data/{key}"], dtype, start, checked_shape(str(path), shape), strides)
    except (ValueError, IndexError, KeyError):
        raise PickleError("has a tensor whose storage is not there") from None
    length = where.member.file_size // where.kind.itemsize
    if len(where.shape) != len(where.strides) or type(start) is not int or not 0 <= start <= length - where.reach:
        raise PickleError(f"has a tensor of shape {list(where.shape)} that its storage of {length} values cannot hold")
    if where.member.compress_type != zipfile.ZIP_STORED or where.member.flag_bits & 1:
        raise PickleError("has packed storages, which torch.save does not write")
    return where


def _dtype(name: str) -> str:
    """What torch calls a type, from the name of it or of its storage. Raises PickleError for one that is not read."""
    word = name.rpartition(".")[2]
    dtype = _STORAGES.get(word, word)
    if dtype not in _TYPES:
        raise PickleError(f"has a tensor of type {word[:40] or 'nothing'}; save it as x.float()")
    return dtype
