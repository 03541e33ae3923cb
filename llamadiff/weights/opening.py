"""What a model is compared with: nothing, another file, a checkpoint, or a directory of a stranger's weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from llamadiff.system.collisions import Named
from llamadiff.system.errors import UserError
from llamadiff.system.progress import Progress, silent
from llamadiff.weights.alone import inspect
from llamadiff.weights.result import WeightReport


def judge_weights(model: str | Path, other: str | Path | None = None, progress: Progress = silent) -> WeightReport:
    """A file by itself, or against whatever ``other`` is. Raises UserError for what cannot be read."""
    if other is None:
        return inspect(model, progress)
    raise UserError(f"{other}: not yet")


def files_of(words: str, path: Path | None) -> Iterator[Named]:
    """The files that are read for one side."""
    if path is not None and path.is_dir():
        yield from ((words, file) for file in sorted(path.rglob("*")) if file.is_file())
    else:
        yield words, path
