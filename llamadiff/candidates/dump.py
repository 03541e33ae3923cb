"""A directory of arrays, one file a tap: .npy, raw .f32 .f16 .bf16, or text; or one .npz.

A raw file's shape comes from ``NAME.json`` ({"shape": [..]}) or from the tap. ``NAME@-1.f32`` holds one token's row
(here the last). Ids may stand in a file ``tokens`` (numbers between white space or commas).
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff import taps
from llamadiff.candidates import text
from llamadiff.candidates.source import Context, Opened, Piece, assemble, named_row, register
from llamadiff.errors import UserError
from llamadiff.trace import Trace

Array = NDArray[Any]

TEXT = (".txt", ".log", ".dat")
RAW = {".f32": "<f4", ".f16": "<f2", ".bf16": "<u2"}
_TOKEN_FILES = ("tokens", "tokens.txt", "tokens.json")


@register
class Dump:
    """``--candidate DIR`` or ``--candidate FILE.npz``."""

    def matches(self, spec: str) -> bool:
        return Path(spec).is_dir() or (spec.endswith(".npz") and Path(spec).is_file())

    def files(self, spec: str) -> Iterator[Path]:
        path = Path(spec)
        if not path.is_dir():
            yield path
            return
        yield from _token_files(path)
        for file in _arrays(path):
            yield file
            if file.suffix in RAW:
                yield file.with_suffix(".json")

    def open(self, spec: str) -> Opened:
        path = Path(spec)
        if not path.is_dir():
            return Opened(
                partial(_loaded, list(_npz(path)), (), ()), (), f"{spec}: an .npz states no token ids", recorded=True
            )
        tokens = _tokens(path)
        untold = f"{spec}: states no token ids; a file {path / 'tokens'} would hold them"
        return Opened(partial(_loaded, list(_pieces(path)), tokens, _unread(path)), tokens, untold, recorded=True)


def _loaded(pieces: Sequence[Piece], tokens: tuple[int, ...], unread: Sequence[str], context: Context) -> Trace:
    return assemble(pieces, context, {"name": "the dump"}, tokens, unread)


def _token_files(folder: Path) -> list[Path]:
    paths = [folder / name for name in _TOKEN_FILES]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def _tokens(folder: Path) -> tuple[int, ...]:
    for path in _token_files(folder):
        words = re.split(r"[\s,\[\]]+", path.read_text(errors="replace").strip())
        ids = [word for word in words if word]
        if not ids or not all(word.isascii() and word.isdigit() for word in ids):
            raise UserError(f"{path}: expected token ids, whole numbers between white space or commas")
        return tuple(map(int, ids))
    return ()


def _arrays(folder: Path) -> list[Path]:
    """The files of a directory that are read as arrays."""
    return [path for path in sorted(folder.rglob("*"))
            if path.is_file() and path.name not in _TOKEN_FILES and path.suffix in (".npy", *RAW, *TEXT)]  # fmt: skip


def _unread(folder: Path) -> list[str]:
    """Files that are called like a tap, and are of no kind that is read."""
    named = {path.name: taps.parse(_name(Path(path.name))[0]) for path in sorted(folder.rglob("*")) if path.is_file()}
    return [name for name, tap in named.items()
            if tap is not None and Path(name).suffix not in (".npy", ".json", *RAW, *TEXT)]  # fmt: skip


def _pieces(folder: Path) -> Iterator[Piece]:
    """Every array of the directory; links out of it are not followed."""
    home = folder.resolve()
    for path in _arrays(folder):
        if home not in path.resolve().parents:
            raise UserError(f"{path}: leads out of the dump directory")
        name, row = _name(path.relative_to(folder))
        if path.suffix == ".npy":
            yield Piece(name, _npy(path), row)
        elif path.suffix in RAW:
            yield Piece(name, _raw(path), row)
        else:
            indices, values = text.read_values(path)
            yield Piece(name, values, row, indices)


def _name(path: Path) -> tuple[str, int | None]:
    return named_row(path.with_suffix("").as_posix())


def _npy(path: Path) -> Array:
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise UserError(f"{path}: not a plain .npy array ({' '.join(str(error).split())[:120]})") from None
    return _numeric(path, array)


def _npz(path: Path) -> Iterator[Piece]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            for name in archive.files:
                stem, row = _name(Path(name + ".npy"))
                yield Piece(stem, _numeric(path, archive[name]), row)
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: not a plain .npz archive ({' '.join(str(error).split())[:120]})") from None


def _numeric(path: Path, array: Array) -> Array:
    if array.dtype.kind not in "fiu":
        raise UserError(f"{path}: values of type {array.dtype}; expected numbers")
    return array if array.dtype.kind == "i" else array.astype(np.float32)


def _raw(path: Path) -> Array:
    """Little-endian values; the sidecar's shape if there is one, else flat."""
    dtype = np.dtype(RAW[path.suffix])
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise UserError(f"{path}: {size} bytes are no whole number of {path.suffix[1:]} values")
    values = np.fromfile(path, dtype)
    looks = _looks_like(values) if path.suffix == ".f32" else None
    if looks:
        raise UserError(f"{path}: as little-endian float32 its values make no sense; it looks like {looks}")
    if path.suffix == ".bf16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32).reshape(_sidecar(path, values.size))


def _looks_like(values: Array) -> str | None:
    """What the bytes of a float32 file seem to be, if not what its name says."""
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
    if not np.isfinite(size).mean() > 0.9:
        return bool(not size.size)
    return bool(not sized.size or ((sized > 1e-12) & (sized < 1e12)).mean() > 0.95)


def _sidecar(path: Path, size: int) -> tuple[int, ...]:
    sidecar = path.with_suffix(".json")
    if not sidecar.is_file():
        return (size,)
    try:
        shape = json.loads(sidecar.read_text())["shape"]
        shape = tuple(int(n) for n in shape)
    except (ValueError, KeyError, TypeError):
        raise UserError(f'{sidecar}: expected {{"shape": [tokens, ...]}}') from None
    if int(np.prod(shape)) != size or any(n < 0 for n in shape):
        raise UserError(f"{path}: {size} values, but {sidecar.name} states the shape {list(shape)}")
    return shape
