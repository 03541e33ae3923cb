"""A directory of arrays, one file a tap: .npy, raw .f32 .f16 .bf16, or text; or one .npz.

A raw file's shape comes from ``NAME.json`` ({"shape": [..]}) or from the tap. ``NAME@-1.f32`` holds one token's row
(here the last). Ids may stand in a file ``tokens`` (numbers between white space or commas).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from llamadiff.candidates.arrays import KINDS, RAW, npz, whole
from llamadiff.candidates.pieces import Unread, named_row
from llamadiff.candidates.source import CandidateSource, Context, assemble
from llamadiff.system.errors import UserError
from llamadiff.system.input import read_text
from llamadiff.trace import taps
from llamadiff.trace.metadata import MAX_ID
from llamadiff.trace.reader import Trace

MAX_FILES = 100_000
MAX_TOKENS_FILE = 1 << 24  # bytes
_TOKEN_FILES = ("tokens", "tokens.txt", "tokens.json")


def matches(spec: str) -> bool:
    """A directory, or an .npz archive."""
    return Path(spec).is_dir() or (spec.endswith(".npz") and Path(spec).is_file())


def files(spec: str) -> Iterator[Path]:
    """The arrays, with the files that say their shapes, and those of token ids."""
    path = Path(spec)
    if not path.is_dir():
        yield path
        return
    yield from token_files(path)
    for file in _arrays(path):
        yield file
        if file.suffix in RAW:
            yield file.with_suffix(".json")


def open_source(spec: str) -> CandidateSource:
    """The headers of all arrays; values are read when they are wanted."""
    path = Path(spec)
    if not path.is_dir():
        return CandidateSource(
            partial(_load_trace, path, *npz(path), ()),
            (),
            f"{spec}: an .npz states no token ids; a directory with a file tokens does",
            recorded=True,
        )
    tokens = read_tokens(path)
    untold = f"{spec}: states no token ids; a file {path / 'tokens'} would hold them"
    return CandidateSource(
        partial(_load_trace, path, list(_pieces(path)), _unread(path), tokens), tokens, untold, recorded=True
    )


def _load_trace(
    path: Path, pieces: Sequence[Unread], unread: Sequence[str], tokens: tuple[int, ...], context: Context
) -> Trace:
    try:
        return assemble(pieces, context, {"name": "the dump"}, tokens, unread)
    except UserError as error:
        raise type(error)(error if str(error).startswith(str(path)) else f"{path}: {error}") from None


def token_files(folder: Path) -> list[Path]:
    """The files of a dump that hold token ids."""
    return [path for name in _TOKEN_FILES if os.path.lexists(path := folder / name)]


def read_tokens(folder: Path) -> tuple[int, ...]:
    """The token ids that lie in a dump; none where there is no file of them."""
    for path in token_files(folder):
        check_inside(folder, path)
        words = read_text(path, MAX_TOKENS_FILE, "token ids").translate(str.maketrans(",[]", "   ")).split()
        ids = [number for word in words if (number := whole(word)) is not None and number < MAX_ID]
        if not ids or len(ids) != len(words):
            raise UserError(f"{path}: expected token ids, whole numbers between white space or commas")
        return tuple(ids)
    return ()


def files_in(folder: Path) -> Iterator[Path]:
    """What lies in a directory and those in it; links to directories are not followed. UserError for too many."""
    count = 0
    for place, folders, names in os.walk(folder):
        folders.sort()
        count += len(names)
        if count > MAX_FILES:
            raise UserError(f"{folder}: holds more than {MAX_FILES} files; give the directory of the dump alone")
        yield from (Path(place, name) for name in sorted(names))


def _arrays(folder: Path) -> list[Path]:
    """The files of a directory that are read as arrays."""
    return [path for path in sorted(files_in(folder)) if path.suffix in KINDS and path.name not in _TOKEN_FILES]


def _unread(folder: Path) -> list[str]:
    """Files that are called like a tap, and are of no kind that is read."""
    others = (path.name for path in files_in(folder) if path.suffix not in (*KINDS, ".json"))
    return [name for name in others if taps.parse(named_row(Path(name).stem)[0]) is not None]


def _pieces(folder: Path) -> Iterator[Unread]:
    """Every array of the directory; links out of it are not followed."""
    for path in _arrays(folder):
        check_inside(folder, path)
        name, row = named_row(path.relative_to(folder).with_suffix("").as_posix())
        yield KINDS[path.suffix](path, name, row)


def check_inside(folder: Path, path: Path) -> None:
    """Raise UserError for a link that leads out of a dump: what lies elsewhere was not given to be read."""
    if path.is_symlink() and folder.resolve() not in path.resolve().parents:
        raise UserError(f"{path}: leads out of the dump directory; copy the file into it")
