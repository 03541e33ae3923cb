"""What an engine fed its encoder, from a file: .npy, .npz, raw, text, .safetensors."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.candidates.arrays import KINDS, npz
from llamadiff.ext.file.safetensors_files import tensors_of
from llamadiff.ext.file.views import whole
from llamadiff.ext.preprocess.processor import MOST
from llamadiff.system.errors import UserError
from llamadiff.system.input import check_regular
from llamadiff.trace.stated import reason

Array = NDArray[Any]
MOST_MEMBERS = 1 << 12  # of an archive
USUAL = ("pixel_values", "input_features", "inp_raw", "mel", "input_values", "pixels", "image")


def read_dump(path: Path, name: str | None) -> tuple[str, Array]:
    """A tensor of a file, by its name if there are several. Raises UserError."""
    if not path.exists():
        raise UserError(f"{path}: no such file; write what the encoder was given with np.save or as raw float32")
    if path.is_dir():
        raise UserError(f"{path}: is a directory; give one file in it")
    found = dict(_tensors(path))
    if name is None:
        name = next((each for each in USUAL if each in found), next(iter(found)) if len(found) == 1 else None)
    if name not in found:
        known = ", ".join(sorted(found)[:8])
        raise UserError(f"{path}: " + (f"has no tensor {name}" if name else "holds several tensors") + f"; give --name "
                        f"with one of {known}")  # fmt: skip
    tensor = found[name]
    if tensor.shape is not None and int(np.prod(tensor.shape, dtype=np.int64)) > MOST:
        raise UserError(f"{path}: {name} has the shape {list(tensor.shape)}; up to {MOST} values are read")
    values = tensor.load(MOST).array if hasattr(tensor, "load") else whole(tensor).reshape(tensor.shape)
    if not values.size:
        raise UserError(f"{path}: {name} is empty; write what the encoder was given")
    return name, np.asarray(values, np.float32)


def tensors_in(path: Path, most: int) -> dict[str, Array]:
    """All arrays of a file, of numbers or of booleans. Raises UserError for one of more values than that."""
    found = {}
    for name, shape, load in _booleans_too(path):
        if shape is not None and int(np.prod(shape, dtype=np.int64)) > most:
            raise UserError(f"{path}: {name} has the shape {list(shape)}; up to {most} values are read")
        found[name] = np.asarray(load())
    return found


def _booleans_too(path: Path) -> Iterator[tuple[str, Sequence[int] | None, Callable[[], Array]]]:
    """Every array of a file: its name, its shape if that is known, and what reads it."""
    if path.suffix != ".npz":
        for name, tensor in _tensors(path):
            whole_one = partial(whole, tensor)
            read = partial(_loaded, tensor) if hasattr(tensor, "load") else partial(_shaped, whole_one, tensor.shape)
            yield name, tensor.shape, read
        return
    check_regular(path, "a file of arrays")
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist()[:MOST_MEMBERS]:
                if info.filename.endswith(".npy"):
                    yield info.filename[:-4], (info.file_size // 8,), partial(_member, path, info)
    except (zipfile.BadZipFile, OSError, NotImplementedError) as error:
        raise UserError(f"{path}: is no archive of np.savez ({reason(error)}); write it anew") from None


def _loaded(tensor: Any) -> Array:
    return np.asarray(tensor.load(MOST).array)


def _shaped(read: Callable[[], Array], shape: Sequence[int]) -> Array:
    return read().reshape(shape)


def _member(path: Path, info: zipfile.ZipInfo) -> Array:
    """An array of an archive, of which no more is unpacked than it says."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open(info) as file:
            return np.asarray(np.lib.format.read_array(file, allow_pickle=False))
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise UserError(
            f"{path}: {info.filename[:80]} is no array of numbers ({reason(error)}); write it anew"
        ) from None


def _tensors(path: Path) -> Iterator[tuple[str, Any]]:
    """Every tensor of a file, still in it."""
    if path.suffix == ".safetensors":
        yield from ((name, each) for name, each in tensors_of(path) if not isinstance(each, str))
    elif path.suffix == ".npz":
        yield from ((each.name, each) for each in npz(path)[0])
    elif path.suffix in KINDS:
        check_regular(path, "a file of an array")
        yield path.stem, KINDS[path.suffix](path, path.stem, None)
    else:
        raise UserError(f"{path}: is of no kind that is read; write .npy, .safetensors, .f32, .f16, .bf16 or .npz")
