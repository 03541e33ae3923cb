"""Temporary files and directories, and who removes them when their process is killed.

Each temporary directory lies in TMPDIR and has a file that its process keeps locked. The system lets go of the lock
when the process dies, however it dies: a directory that nobody holds is litter. A temporary file lies beside the file
whose name it will take, and a temporary directory has a note of it.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from llamadiff.system.stops import hold_signals

PREFIX = "llamadiff-"  # of temporary directories
LONGEST = 200  # bytes of a file's own name that its temporary name repeats
ATTEMPTS = 5  # others tidy up: a directory may be gone before it is locked
_PART = re.compile(r"\..*\.[0-9a-f]{16}\.part", re.DOTALL)
_OWN = dict[Path, Any]()  # this process's directories, and their locks


@contextmanager
def temporary_file(path: Path) -> Iterator[Path]:
    """A new, empty file beside ``path``, to be written and renamed; it is gone at the end if it still has that name.

    Raises OSError if it cannot be made.
    """
    path = Path(os.path.realpath(path))  # a link stays one: its target is what is replaced
    name = os.fsdecode(os.fsencode(path.name)[:LONGEST])
    part = path.with_name(f".{name}.{os.urandom(8).hex()}.part")
    with ExitStack() as stack:
        with suppress(OSError):  # no place for a note: nobody will know of the file
            note = stack.enter_context(temporary_directory()) / "note"
            note.write_bytes(os.fsencode(part))
        part.open("xb").close()
        try:
            yield part
        finally:
            with suppress(OSError):  # Windows removes no file that is open
                _remove_file(part)


@contextmanager
def temporary_directory() -> Iterator[Path]:
    """A new directory in TMPDIR that nobody else can read, gone at the end. Raises OSError if it cannot be made."""
    with hold_signals():  # a directory that is not known yet would outlive a command that is stopped here
        folder, lock = _locked_directory()
        _OWN[folder] = lock
    try:
        yield folder
    finally:
        _end(folder)


def temporary_place() -> Path:
    """Where temporary directories are made: TMPDIR, or TEMP on Windows."""
    return Path(os.path.realpath(os.environ.get("TMPDIR") or os.environ.get("TEMP") or "/tmp"))  # noqa: S108


def cache_directory() -> Path | None:
    """Where this user's files of llamadiff are kept from run to run; None where nobody is at home."""
    with suppress(RuntimeError):
        try:
            from platformdirs import user_cache_path
        except ImportError:  # a runner started this where nothing is installed
            return Path.home() / ".cache" / "llamadiff"
        return user_cache_path("llamadiff", appauthor=False)
    return None


def is_private(place: Path) -> bool:
    """Whether a directory, and no link to one, is this user's, and no other can write in it. Raises OSError."""
    others = 0 if sys.platform == "win32" else 0o022  # there a profile is its user's alone, which no mode says
    return _is_own(place) and not place.lstat().st_mode & others


def sweep() -> None:
    """Remove what dead processes of this user left on this machine. What cannot be removed is tried again next time."""
    with suppress(OSError):
        for folder in temporary_place().glob(f"{_prefix()}????????"):
            with suppress(OSError, ImportError):
                if _is_own(folder) and (lock := _lock(folder)) is not None:
                    _remove(folder)  # while it is locked: whoever has just made it would take it for its own
                    lock.release()
                    if sys.platform == "win32":  # no open file goes there; elsewhere it may be another's by now
                        shutil.rmtree(folder, ignore_errors=True)


def remove_own() -> None:
    """Remove what this process has made: for one that must go without unwinding."""
    for folder in list(_OWN):
        _end(folder)


def _locked_directory() -> tuple[Path, Any]:
    """A new directory and its lock; None where there are no locks, for one whose name no sweep knows."""
    from tempfile import mkdtemp

    for _ in range(ATTEMPTS):
        folder = Path(mkdtemp(prefix=_prefix(), dir=temporary_place()))
        with suppress(OSError, ImportError):  # ImportError: a runner started this where nothing is installed
            if (lock := _lock(folder)) is not None:
                return folder, lock
        shutil.rmtree(folder, ignore_errors=True)
    return Path(mkdtemp(prefix=PREFIX, dir=temporary_place())), None


def _lock(folder: Path) -> Any:
    """The lock of a directory; None where a living process has it."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder / "lock", thread_local=False)
    with suppress(Timeout):
        lock.acquire(timeout=0)
        if (folder / "lock").exists():  # whoever had it before may have removed it
            return lock
        lock.release()
    return None


def _end(folder: Path) -> None:
    """Let go of a directory and remove it; what cannot be removed yet is tried again by ``remove_own``."""
    if (lock := _OWN.get(folder)) is not None:
        lock.release()
    with suppress(OSError):
        _remove(folder)
    if not folder.exists():
        _OWN.pop(folder, None)


def _remove(folder: Path) -> None:
    """Remove a directory, and before it the file that it has a note of, if nobody else can have written that."""
    with suppress(FileNotFoundError):
        part = Path(os.fsdecode((folder / "note").read_bytes()))
        if is_private(folder) and _PART.fullmatch(part.name):  # it may be cut
            _remove_file(part)
    shutil.rmtree(folder, ignore_errors=True)


def _remove_file(path: Path) -> None:
    """Remove a file, and no other thing that has taken its place. Raises OSError."""
    with suppress(FileNotFoundError, NotADirectoryError):
        if stat.S_ISREG(path.lstat().st_mode):
            path.unlink()


def _is_own(place: Path) -> bool:
    """Whether a directory, and no link to one, is this user's; on Windows, where users have no number, all are."""
    about = place.lstat()
    return stat.S_ISDIR(about.st_mode) and about.st_uid == getattr(os, "geteuid", int)()


def _prefix() -> str:
    """What begins the names on this machine: others may have the same TMPDIR."""
    import platform

    return PREFIX + re.sub(r"\W", "_", platform.node()) + "-"
