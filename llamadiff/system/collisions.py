"""Refuses, before any work, to write over a file that the command reads, whatever link leads to it."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

from llamadiff.system.errors import UserError
from llamadiff.system.output import is_stream

Named: TypeAlias = tuple[str, str | os.PathLike[str] | None]  # words for a file, and the file; None: there is none
STANDARD_OUTPUT = "-"


def refuse_collisions(reads: Iterable[Named], writes: Iterable[Named]) -> None:
    """Raise UserError if a file that is written is one that is read, or is written twice; links are seen through.

    ``reads`` are such as ("the candidate", path), ``writes`` such as ("-o", path).
    """
    taken: dict[Hashable, tuple[str, Path, str]] = {}
    for words, path in _files(reads):
        for place in _places(path):
            taken.setdefault(place, (words, path, ", which would be overwritten"))
    for words, path in _files(writes):
        if path != Path(STANDARD_OUTPUT) and is_stream(path):
            continue
        places = _places(path)
        taker = next((taken[place] for place in places if place in taken), None)
        if taker is not None:
            what, other, loss = taker
            called = "" if other == path else f" ({other})"
            raise UserError(f"{words}: {_path_text(path)} is {what}{called}{loss}; give another name")
        taken |= dict.fromkeys(places, (f"what {words} writes too", path, ""))


def saved_files(folder: str | os.PathLike[str] | None, words: str = "-o") -> Iterator[tuple[str, Path]]:
    """The files that a comparison keeps."""
    if folder is not None:
        yield from ((words, Path(folder) / name) for name in ("baseline.safetensors", "engine.safetensors"))


def kept_files(folder: str | os.PathLike[str] | None) -> Iterator[Named]:
    """The files among those of a directory that wrong ops may replace."""
    if folder is not None:
        for ending in ("safetensors", "txt"):
            yield from (("--keep", path) for path in Path(folder).glob(f"[0-9]*-[0-9]*.{ending}"))


def _files(named: Iterable[Named]) -> Iterator[tuple[str, Path]]:
    return ((words, Path(path)) for words, path in named if path is not None)


def _places(path: Path) -> list[Hashable]:
    """What tells a file: the name that its links lead to, and where it is kept, if it is there."""
    if path == Path(STANDARD_OUTPUT):
        return [STANDARD_OUTPUT]
    try:
        status = path.stat()
    except OSError:
        name = os.path.realpath(path)
        return [name.casefold() if _folds_case(Path(name).parent) else name]
    return [os.path.realpath(path), (status.st_dev, status.st_ino)]


def _folds_case(folder: Path) -> bool:
    """Whether names there that differ in case alone are one file's, as a rule on macOS and on Windows."""
    other = folder.parent / folder.name.swapcase()  # the root has no name
    return other.name != folder.name and other.exists() and other.samefile(folder)


def _path_text(path: Path) -> str:
    return "standard output" if path == Path(STANDARD_OUTPUT) else str(path)
