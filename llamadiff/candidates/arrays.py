"""Reads .npy, .npz, raw and text files: what they begin with is checked first, values are read when they are wanted."""

from __future__ import annotations

import math
import warnings
import zipfile
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from itertools import count, islice
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.candidates.pieces import Unread, named_row
from llamadiff.system.errors import UserError
from llamadiff.system.input import check_regular
from llamadiff.trace.reader import MAX_AXES
from llamadiff.trace.stated import read_json, reason

Array = NDArray[Any]

RAW = {".f32": "<f4", ".f16": "<f2", ".bf16": "<u2"}
MAX_HEADER = 4096  # bytes of an .npy header: that of an array of numbers has about 100
MAX_SIDECAR = 1 << 16
MAX_MEMBERS = 1 << 16  # of an archive
SAMPLE = 1 << 20  # bytes that are looked at to tell what they are
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # what np.savez and np.savez_compressed write
_SAVE = "save numbers with np.save(path, array.astype(np.float32))"

MAX_LINE = 1000  # bytes, of a text
FIRST = 1000  # lines of a text that are looked at before anything is run
MAX_BYTES = 1 << 30  # of a text
_EXPECTED = "expected lines such as [12] = 0.581"
MAX_NUMBER = 400  # characters: the largest float64, written out, has 316
MAX_WHOLE = 18  # digits: what fits into 64 bits
_DIGITS = frozenset("0123456789")
_DECIMAL = _DIGITS | frozenset("+-.eE")
_NOT_FINITE = frozenset({"nan", "inf", "infinity"})


@dataclass(frozen=True)
class Header:
    """What an array's file says before its values."""

    where: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int = 0
    by_columns: bool = False

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def values(self, file: IO[bytes]) -> Array:
        """The values of a file that stands at its beginning; floats as float32."""
        file.read(self.offset)
        data = file.read(self.n_bytes)
        file.read(1)  # an archive checks its sum at the end
        if len(data) != self.n_bytes:
            raise UserError(f"{self.where}: ends after {len(data)} of its {self.n_bytes} bytes of values")
        found = np.frombuffer(data, self.dtype).reshape(self.shape, order="F" if self.by_columns else "C")
        with np.errstate(all="ignore"):  # what float32 cannot hold is infinite
            return found.astype(found.dtype.newbyteorder("=") if found.dtype.kind == "i" else np.float32)


def npy(path: Path, name: str, row: int | None) -> Unread:
    """An array of a .npy file. Raises UserError if its header is not that of numbers, or not that of the file."""
    check_regular(path, "a .npy file")
    header = _header(str(path), _start(path, MAX_HEADER), path.stat().st_size)
    return Unread(name, row, header.shape, partial(_from_file, path, header))


def _start(path: Path, most: int) -> bytes:
    """The first bytes of a file."""
    try:
        with path.open("rb") as file:
            return file.read(most)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def _from_file(path: Path, header: Header, _most: int) -> tuple[Array, None]:
    try:
        with path.open("rb") as file:
            return header.values(file), None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def _header(where: str, start: bytes, length: int) -> Header:
    """The header at the start of ``length`` bytes of an array."""
    file, kinds = BytesIO(start), {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Python 2's headers, and of odd escapes
            version, _ = np.lib.format.read_magic(file)
            if version not in kinds:
                raise ValueError(f"its header is of version {version}")
            shape, by_columns, dtype = kinds[version](file, max_header_size=MAX_HEADER)
    except Exception as error:  # numpy, and the parser under it, raise many kinds
        raise UserError(f"{where}: not a plain .npy array ({reason(error)}); {_SAVE}") from None
    if dtype.kind not in "fiu":
        raise UserError(f"{where}: not a plain .npy array of numbers but of {str(dtype)[:40]}; {_SAVE}")
    header = Header(where, checked_shape(where, shape), dtype, file.tell(), by_columns)
    if length != header.offset + header.n_bytes:
        raise UserError(
            f"{where}: the shape {list(shape)} of {dtype} takes {header.n_bytes} bytes, but there are "
            f"{length - header.offset}; write one array a file, whole"
        )
    return header


def checked_shape(where: str, shape: Any) -> tuple[int, ...]:
    """A shape that a tensor may have."""
    if not isinstance(shape, (tuple, list)) or len(shape) > MAX_AXES:
        raise UserError(f"{where}: expected a shape of up to {MAX_AXES} axes, such as [tokens, 256]")
    if not all(type(n) is int and 0 <= n < 1 << 48 for n in shape):
        raise UserError(f"{where}: {str(shape)[:60]} is no shape; expected whole numbers such as [tokens, 256]")
    return tuple(shape)


def npz(path: Path) -> tuple[list[Unread], list[str]]:
    """The arrays of an .npz archive, and the names of its members that are none.

    Raises UserError for an archive that is damaged, encrypted or packed in another way than NumPy's.
    """
    check_regular(path, "an .npz archive")
    try:
        archive = zipfile.ZipFile(path)
    except Exception as error:  # zipfile raises many kinds
        raise UserError(f"{path}: not a plain .npz archive ({reason(error)}); write it with np.savez") from None
    members = archive.infolist()
    if len(members) > MAX_MEMBERS or len({info.filename for info in members}) != len(members):
        raise UserError(f"{path}: {len(members)} members, or two of one name; np.savez writes one a tensor")
    arrays = [info for info in members if info.filename.endswith(".npy")]
    others = [info.filename for info in members if not info.filename.endswith(".npy")]
    return [_member(path, archive, info) for info in arrays], others


def _member(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Unread:
    """An array of an archive, unpacked no further than its header."""
    name, row = named_row(info.filename.removesuffix(".npy"))
    where = f"{path}: {name[:60]}"
    if info.flag_bits & 1 or info.compress_type not in _METHODS:
        raise UserError(f"{where}: encrypted, or packed in an unknown way; write it with np.savez")
    with _whole(where), archive.open(info) as member:
        header = _header(where, member.read(MAX_HEADER), info.file_size)
    return Unread(name, row, header.shape, partial(_from_archive, archive, info, header))


def _from_archive(archive: zipfile.ZipFile, info: zipfile.ZipInfo, header: Header, _most: int) -> tuple[Array, None]:
    with _whole(header.where), archive.open(info) as member:
        return header.values(member), None


@contextmanager
def _whole(where: str) -> Iterator[None]:
    """Raises UserError where an archive is damaged."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # zipfile and zlib raise many kinds
        raise UserError(f"{where}: damaged ({reason(error)}); write it anew") from None


def raw(path: Path, name: str, row: int | None) -> Unread:
    """Little-endian values of a file; the sidecar's shape if there is one, else flat."""
    check_regular(path, f"a file of {path.suffix[1:]} values")
    dtype, size = np.dtype(RAW[path.suffix]), path.stat().st_size
    if size % dtype.itemsize:
        raise UserError(f"{path}: {size} bytes are no whole number of {path.suffix[1:]} values")
    looks = _looks_like(_start(path, min(size, SAMPLE))) if path.suffix == ".f32" else None
    if looks:
        raise UserError(f"{path}: as little-endian float32 its values make no sense; it looks like {looks}")
    header = Header(str(path), _sidecar(path, size // dtype.itemsize), dtype)
    return Unread(name, row, header.shape, partial(_from_raw, path, header))


def _from_raw(path: Path, header: Header, most: int) -> tuple[Array, None]:
    values, _ = _from_file(path, header, most)  # bfloat16 as whole numbers, which float32 holds
    return (values.astype(np.uint32) << 16).view(np.float32) if path.suffix == ".bf16" else values, None


def _looks_like(start: bytes) -> str | None:
    """What the bytes of a float32 file seem to be, if not what its name says."""
    values = np.frombuffer(start[: len(start) // 4 * 4], "<f4")
    if _plausible(values):
        return None
    others = {
        "big-endian float32": values.byteswap(),
        "float64 (.f32 is 32 bits wide)": values[: values.size // 2 * 2].view("<f8"),
        "float16 (name it .f16)": values.view("<f2"),
        "bfloat16 (name it .bf16)": (values.view("<u2").astype(np.uint32) << 16).view(np.float32),
        "whole numbers, 32 bits": values.view("<i4").astype(np.float64),
    }
    return next((name for name, other in others.items() if _plausible(other)), None)


def _plausible(values: Array) -> bool:
    """Whether nearly all values have a size that activations have; zeros and a few that are not finite do not count."""
    with np.errstate(all="ignore"):
        size = np.abs(np.asarray(values, np.float64))
        sized = size[np.isfinite(size) & (size > 0)]
    if not size.size or np.isfinite(size).mean() <= 0.9:
        return not size.size
    return bool(not sized.size or ((sized > 1e-12) & (sized < 1e12)).mean() > 0.95)


def _sidecar(path: Path, count: int) -> tuple[int, ...]:
    """The shape that ``NAME.json`` states for ``count`` values; all along one axis without it."""
    sidecar = path.with_suffix(".json")
    if not sidecar.exists():
        return (count,)
    meant = '{"shape": [tokens, ...]}'
    stated = read_json(sidecar, MAX_SIDECAR, meant)
    shape = checked_shape(str(sidecar), stated.get("shape") if isinstance(stated, dict) else None)
    if math.prod(shape) != count:
        raise UserError(f"{path}: {count} values, but {sidecar.name} states the shape {list(shape)}")
    return shape


def parse_printed(path: Path, name: str, row: int | None) -> Unread:
    """Values of a text: ``[12] = 0.581001``, ``12: 0.58``, or one number a line.

    Raises UserError if one of the first lines is no value: that is said before anything is run.
    """
    for _ in islice(_values(path), FIRST):
        pass
    return Unread(name, row, None, partial(_from_text, path))


def _from_text(path: Path, most: int) -> tuple[Array, Array]:
    """Values of a text dump, up to ``most`` of them, and their indices.

    Lines that are empty or begin with # are left out. Raises UserError naming the first line that is no value.
    """
    indices, values = array("q"), array("d")
    for index, value in _values(path):
        indices.append(len(values) if index is None else index)
        values.append(value)
        if len(values) > most:
            raise UserError(f"{path}: more than {most} values, which is all that the tensor of this name has")
    with np.errstate(over="ignore"):  # what float32 cannot hold is infinite
        return np.array(values, np.float64).astype(np.float32), np.array(indices, np.int64)


def _values(path: Path) -> Iterator[tuple[int | None, float]]:
    """The index, where there is one, and the value of each line."""
    check_regular(path, "a text file of numbers")
    if path.stat().st_size > MAX_BYTES:
        raise UserError(f"{path}: {path.stat().st_size >> 20} MiB of text; write .npy or a trace instead")
    try:
        with path.open("rb") as file:
            for line_number in count(1):
                line = file.readline(MAX_LINE + 1)
                if not line:
                    return
                if len(line) > MAX_LINE:
                    raise UserError(f"{path}:{line_number}: a line of more than {MAX_LINE} bytes; {_EXPECTED}")
                stripped = line.decode(errors="replace").strip()
                if stripped and not stripped.startswith("#"):
                    yield _parse_line(f"{path}:{line_number}", stripped)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def _parse_line(where: str, text: str) -> tuple[int | None, float]:
    """The index, where there is one, and the value of a line. Raises UserError if it has no value."""
    left, sign, right = text.partition("=") if "=" in text else text.partition(":")
    value = number((right if sign else left).strip().removesuffix(",").rstrip())
    index = whole(left.strip().removeprefix("[").removesuffix("]").strip()) if sign else None
    if value is None or (sign and index is None):
        raise UserError(f"{where}: {text[:40]!r} is no value; {_EXPECTED}")
    return index, value


def number(word: str) -> float | None:
    """A decimal number, nan or inf; None for anything else. What float64 cannot hold is infinite."""
    if not 0 < len(word) <= MAX_NUMBER:
        return None
    if not _DECIMAL.issuperset(word) and word.lstrip("+-").lower() not in _NOT_FINITE:
        return None
    try:
        return float(word)
    except ValueError:
        return None


def whole(word: str) -> int | None:
    """A whole number without a sign; None for anything else."""
    return int(word) if 0 < len(word) <= MAX_WHOLE and _DIGITS.issuperset(word) else None


# What a name ends in -> its array.
KINDS: Mapping[str, Callable[[Path, str, int | None], Unread]] = {
    ".npy": npy, **dict.fromkeys(RAW, raw), **dict.fromkeys((".txt", ".log", ".dat"), parse_printed)
}  # fmt: skip
