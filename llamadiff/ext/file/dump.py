"""A directory of a stranger's dequantized weights as the other side: an array a tensor, by the file's names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.candidates.arrays import RAW, npy, raw
from llamadiff.candidates.dump import files_in
from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.file.against import OtherSide, label_of
from llamadiff.ext.file.misread import misreading
from llamadiff.ext.file.pairs import Measured, Pair, in_file
from llamadiff.ext.file.safetensors_files import tensors_of
from llamadiff.ext.file.views import Stored, whole
from llamadiff.ext.file.weight_faults import SAME, weight_fault
from llamadiff.numerics.arithmetic import precision
from llamadiff.numerics.tolerances import ROUNDING
from llamadiff.result.oddity import Oddity
from llamadiff.system.errors import UserError

Array = NDArray[Any]
READ = (".npy", ".safetensors", *RAW)
PREFIX = "weights/"


class WeightDump(OtherSide):
    """Arrays of a directory. Raises UserError where none is called like a tensor of the file."""

    def __init__(self, model: ModelFile, folder: Path) -> None:
        self.model, self.folder, self.label = model, folder, label_of(folder)
        found = [(name, array) for name, array in _arrays(folder) if name in model.weights]
        self.views = {name: _Lazy(model.weights.shape(name), array) for name, array in found}
        if not self.views:
            raise UserError(
                f"{folder}: holds no checkpoint (no config.json), and no array that is called like a tensor; "
                f"write {model.tensors[0] if model.tensors else 'blk.0.attn_q.weight'}.npy and so on"
            )

    def pairs(self) -> Sequence[Pair]:
        return [
            Pair(in_file(self.model, name), view, floor=SAME + ROUNDING[view.precision], decoded=True,
                 exact=view.precision == "f32")
            for name, view in self.views.items() if view.size == int(np.prod(self.model.weights.shape(name)))
        ]  # fmt: skip

    def oddities(self) -> Iterator[Oddity]:
        for name, view in self.views.items():
            shape = self.model.weights.shape(name)
            if view.size != int(np.prod(shape)):
                yield Oddity(name, f"{view.size} values where the file has {int(np.prod(shape))} ({list(shape)})",
                             "shape")  # fmt: skip

    def notes(self) -> Iterator[str]:
        left = len(self.model.tensors) - len(self.views)
        if left:
            yield f"{left} of the file's {len(self.model.tensors)} tensors are not in {self.label}"

    def explain(self, measured: Measured) -> Oddity:
        """The layout error that gives these values; else what was done to right ones."""
        name = measured.pair.name
        values = whole(measured.pair.theirs).reshape(-1)
        told = misreading(self.model.weights, name, values)
        if told is not None:
            return Oddity(name, told.says, told.cause)
        fault = weight_fault(self.model, name, values)
        return Oddity(name, fault or "differs from the file", "changed")


class _Lazy:
    """An array that is read when it is wanted, under the file's shape."""

    kind = "F32"

    def __init__(self, shape: tuple[int, ...], found: Any) -> None:
        self.shape, self._found = shape, found

    @property
    def size(self) -> int:
        return int(np.prod(self._found.shape, dtype=np.int64))

    @cached_property
    def precision(self) -> str:
        return precision(self._values())

    def _values(self) -> Array:
        if isinstance(self._found, Stored):
            return whole(self._found).reshape(-1)
        values, _ = self._found.read(1 << 40)
        return np.asarray(values, np.float32).reshape(-1)

    def take(self, rows: Array) -> Array:
        return np.asarray(self._values().reshape(-1, self.shape[-1])[rows], np.float32)


def _arrays(folder: Path) -> Iterator[tuple[str, Any]]:
    """Every array of a directory, by its name."""
    for path in _files(folder):
        name = path.relative_to(folder).with_suffix("").as_posix().removeprefix(PREFIX)
        if path.suffix == ".safetensors":
            yield from (
                (key.removeprefix(PREFIX), found) for key, found in tensors_of(path) if not isinstance(found, str)
            )
        elif path.suffix == ".npy":
            yield name, npy(path, name, None)
        else:
            yield name, raw(path, name, None)


def _files(folder: Path) -> Iterator[Path]:
    """What can be arrays; links out of the directory are not followed."""
    for path in files_in(folder):
        if path.is_symlink() and folder.resolve() not in path.resolve().parents:
            raise UserError(f"{path}: leads out of the directory; copy the file into it")
        if path.suffix in READ:
            yield path
