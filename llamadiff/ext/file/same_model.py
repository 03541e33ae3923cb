"""Is a checkpoint the one that a file was made of: by what its config.json calls it, and by rows of its matrices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from llamaref.file_kind import other_kind
from llamaref.known_tensors import architectures
from numpy.typing import NDArray

from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.file.config_keys import model_types
from llamadiff.ext.file.pairs import in_file
from llamadiff.ext.file.safetensors_files import open_checkpoint
from llamadiff.ext.file.views import Stored, Transposed, View, blocks_of_rows, rows_of, sample, width_of
from llamadiff.system.errors import UserError
from llamadiff.trace.stated import read_json

Array = NDArray[Any]
MAX_CONFIG = 1 << 22
MATRICES, ROWS = 12, 6  # of the file that are looked for, and rows of each
NARROW = 64  # values of a row, of which fewer are like another one by chance
ALIKE = 0.6  # the correlation of a row with itself after any quantization (signs alone leave 0.8)
GIVE = "give the checkpoint that it was converted from"


def config_json(folder: Path) -> dict[str, Any]:
    """The config.json of a checkpoint. Raises UserError."""
    config = read_json(folder / "config.json", MAX_CONFIG, "the config.json of a checkpoint")
    if not isinstance(config, dict):
        raise UserError(f"{folder / 'config.json'}: expected an object of hyper-parameters")
    return config


def same_checkpoint(
    file: ModelFile, folder: Path, config: Mapping[str, Any]
) -> tuple[dict[str, Stored], dict[str, str]]:
    """The tensors of the checkpoint that a file was made of, and those that are not read (``open_checkpoint``).

    Raises UserError for a checkpoint of another model.
    """
    check_same_kind(file, config, folder)
    tensors, unread = open_checkpoint(folder)
    check_same_matrices(file, tensors, str(folder))
    return tensors, unread


def check_same_kind(file: ModelFile, config: Mapping[str, Any], folder: Path) -> None:
    """Raise UserError for a config.json whose model_type is another architecture's than the file's."""
    kind = str(config.get("model_type"))
    if kind in model_types(file.architecture) or other_kind(file.weights.fields, file.tensors) is not None:
        return
    own = _plain(file.architecture)
    others = [name for name in map(_plain, architectures()) if name == _plain(kind)]
    others += [name for name in map(_plain, architectures()) if kind in model_types(name)]
    if others and not any(other in own or own in other for other in others):  # jina-bert-v2's are of model_type bert
        raise UserError(f"{folder}: model_type is {kind[:40]!r}, {file.path.name} holds {file.architecture}; {GIVE}")


def check_same_matrices(file: ModelFile, views: Mapping[str, View], label: str) -> None:
    """Raise UserError where most matrices of a file are in no tensor of the other side, in whatever order of rows,
    transposed, fused or stacked, and whatever their types.
    """
    sought = list(_sought(file))
    widths = {each.rows.shape[1] for each in sought}
    for view in _by_size(views, {each.size for each in sought}):
        if 2 * sum(each.is_found for each in sought) >= len(sought):
            return
        if width_of(view) in widths:
            _look(view, sought)
        if len(view.shape) == 2 and view.shape[0] in widths:
            _look(Transposed(view), sought)
    lacking = [each.name for each in sought if not each.is_found]
    if 2 * len(lacking) > len(sought):
        raise UserError(
            f"{label}: holds another model than {file.path.name}: {len(lacking)} of {len(sought)} matrices of the file "
            f"that were looked for are in none of its tensors, the first is {lacking[0]}; {GIVE}"
        )


@dataclass(eq=False)
class _Sought:
    """Some rows of a tensor of the file, of length 1, and how like each the most alike row is that was seen."""

    name: str
    size: int
    rows: Array
    best: Array

    @property
    def is_found(self) -> bool:
        return bool(2 * (self.best > ALIKE).sum() > len(self.best))


def _sought(file: ModelFile) -> Iterator[_Sought]:
    """The first matrices of the file that have rows to be told apart."""
    count = 0
    for name in file.tensors:
        view = in_file(file, name)
        if len(view.shape) < 2 or width_of(view) < NARROW or count == MATRICES:
            continue
        rows = _directions(view.take(sample(view, ROWS)))
        rows = rows[np.linalg.norm(rows, axis=1) > 0]
        if len(rows):
            count += 1
            yield _Sought(name, rows_of(view) * width_of(view), rows, np.zeros(len(rows)))


def _by_size(views: Mapping[str, View], sizes: set[int]) -> list[View]:
    """The matrices of the other side, first those of a sought one's size."""
    matrices = [view for view in views.values() if len(view.shape) > 1 and min(view.shape)]
    return sorted(matrices, key=lambda view: rows_of(view) * width_of(view) not in sizes)


def _look(view: View, sought: list[_Sought]) -> None:
    alike = [each for each in sought if each.rows.shape[1] == width_of(view) and not each.is_found]
    if not alike:
        return
    for numbers in blocks_of_rows(view):
        theirs = _directions(view.take(numbers))
        for each in alike:
            each.best = np.maximum(each.best, np.abs(each.rows @ theirs.T).max(axis=1))


def _directions(rows: Array) -> Array:
    """Rows about their mean, of length 1; zeros where they are of one value, or not finite."""
    with np.errstate(all="ignore"):
        centred = rows - rows.mean(axis=1, keepdims=True)
        unit = centred / np.linalg.norm(centred, axis=1, keepdims=True)
    return np.asarray(np.nan_to_num(unit, posinf=0.0, neginf=0.0))


def _plain(name: str) -> str:
    return name.replace("-", "").replace("_", "").lower()
