"""Files that are written: complete under their name, or not there at all."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import disk_usage

from llamadiff.system.errors import NoRoomError, UserError
from llamadiff.system.stale_files import temporary_file

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
OPEN_FILES_MOVE = sys.platform != "win32"  # whether what is open, or mapped, can have its name taken


def check_target(path: Path) -> None:
    """Raise UserError if no file can be put there: better said before the work than after it."""
    if path.is_dir():
        raise UserError(f"{path}: is a directory; give the name of a file in it")
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: is not a regular file; give the name of one")
    if _is_model(path):
        raise UserError(f"{path}: is a model, which is not overwritten; give another name")
    if not path.parent.is_dir():
        raise UserError(f"{path}: cannot be written ({path.parent} is not a directory)")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UserError(f"{path}: cannot be written (no permission to write in {path.parent})")


def make_room(path: Path, force: bool = False) -> None:
    """Make the folder that a file is to lie in. Raises UserError for a file that is there, but by ``force``."""
    if path.is_file() and not force and not _is_model(path):
        raise UserError(f"{path}: is there already; give another name, or --force to overwrite it")
    with suppress(OSError):  # check_target says what stands in the way
        path.parent.mkdir(parents=True, exist_ok=True)


def _is_model(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def check_text_target(path: Path) -> None:
    """The same for text, which may also go to a device or a pipe."""
    if not is_stream(path):
        check_target(path)


def is_stream(path: Path) -> bool:
    """Whether a path is a device or a pipe: written to, never replaced."""
    return path.exists() and not path.is_file() and not path.is_dir()


def write_text(path: Path, text: str) -> None:
    """Write a text file as UTF-8. Raises UserError, and leaves what was there, if it cannot be written whole."""
    try:
        if is_stream(path):
            path.write_bytes(encode(text))
        else:
            write_whole(path, encode(text))
    except OSError as error:
        raise unwritten(path, error) from None


def add_text(path: Path, text: str, most: int) -> None:
    """Put text at the end of a file that others write to too.

    Raises UserError if it would have more than ``most`` bytes then, or cannot be written.
    """
    data = encode(text)
    try:
        if path.exists() and path.stat().st_size + len(data) > most:
            raise UserError(f"{path}: has no room for {_amount(len(data))} more: it may have {_amount(most)}")
        with path.open("ab") as file:
            file.write(data)
    except OSError as error:
        raise unwritten(path, error) from None


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that appears when it is complete. Raises UserError, and leaves what was there, if it cannot be."""
    try:
        with temporary_file(path) as temporary:
            temporary.write_bytes(data)
            os.replace(temporary, os.path.realpath(path))
    except OSError as error:
        raise unwritten(path, error, len(data)) from None


@contextmanager
def move_aside(path: Path) -> Iterator[Path]:
    """A file under another name, while it is written to; under its own where what is open, or mapped, keeps that."""
    if not OPEN_FILES_MOVE:
        yield path
        return
    with temporary_file(path) as place:
        os.replace(path, place)
        yield place
        os.replace(place, path)


def remove(path: Path) -> None:
    """Remove a file that will go with its directory where it is still open, or mapped, and keeps its name so long."""
    try:
        path.unlink(missing_ok=True)
    except PermissionError:
        if OPEN_FILES_MOVE:
            raise


def unwritten(path: Path, error: OSError, size: int = 0) -> UserError:
    """What is said of a file that cannot be written; of a full disk, how large (in bytes) the file would have been."""
    said = f"{path}: cannot be written ({error.strerror})"
    if error.errno not in NO_ROOM:
        return UserError(said)
    needs = f"{_amount(size)} are needed, {_amount(disk_usage(path.parent).free)} are free"
    return NoRoomError(f"{said}: {needs}", needs)


def _amount(size: int) -> str:
    """Bytes, as a reader takes them in."""
    unit = min(max((len(str(size)) - 1) // 3, 1), 4)
    return f"{size / 1000**unit:.0f} {'kMGT'[unit - 1]}B"


def encode(text: str) -> bytes:
    r"""UTF-8; what has no UTF-8 (a file name's stray bytes) becomes \udc80 and the like, which JSON reads back."""
    return text.encode("utf-8", "backslashreplace")


@contextmanager
def made_directory(folder: Path) -> Iterator[str]:
    """A directory to keep things in; if nothing comes of it, the directories that were made for it are gone again."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made ({error.strerror})") from None
    try:
        yield str(folder)
    except BaseException:
        with suppress(OSError):  # not empty: something came of it
            for path in missing:
                path.rmdir()
        raise
