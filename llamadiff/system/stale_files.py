"""Temporary files of a process, and who removes them when it is killed.

A process that makes temporary files has a directory of its own, with a file in it that it keeps locked, and another
that says where it makes them. The system lets go of the lock when the process dies, however it dies; so where nobody
holds it, what that process made is litter. It is known by its name: the directory's token is part of every one.

These directories lie in the user's cache directory or, where that cannot be written, in one of the user's in TMPDIR.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PREFIX = "llamadiff-"  # of scratch directories
LONGEST = 200  # bytes of a file's own name that its temporary name repeats
MAX_NOTES = 1 << 26  # bytes
PATIENCE, OFTEN = 2.0, 0.02  # seconds that others may take to remove something; between two looks


@contextmanager
def temporary_file(path: Path) -> Iterator[Path]:
    """A new, empty file beside ``path``, to be written and renamed; it is gone at the end if it still has that name.

    Raises OSError if it cannot be made.
    """
    path = Path(os.path.realpath(path))  # a link stays one: its target is what is replaced
    with _made(path.parent, f".{os.fsdecode(os.fsencode(path.name)[:LONGEST])}.", ".part") as made:
        yield made


@contextmanager
def temporary_directory(parent: Path | None = None) -> Iterator[Path]:
    """A new directory in TMPDIR, or in ``parent``, that nobody else can read, gone at the end.

    Raises OSError if it cannot be made.
    """
    with _made(Path(os.path.realpath(parent)) if parent else temporary_place(), PREFIX, "") as made:
        yield made


def temporary_place() -> Path:
    """Where scratch directories are made: TMPDIR, or TEMP on Windows."""
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
    about = os.lstat(place)
    others = 0 if sys.platform == "win32" else 0o022  # there a profile is its user's alone, which no mode says
    return stat.S_ISDIR(about.st_mode) and about.st_uid == _user() and not about.st_mode & others


def sweep() -> None:
    """Remove what dead processes of this user left on this machine. What cannot be removed is tried again next time."""
    for place in _places():
        with suppress(OSError):
            for folder in place.glob(f"{_host()}-*") if is_private(place) else ():
                with suppress(OSError, ImportError):
                    _sweep_one(folder)
            place.rmdir()  # where nothing is left in it


def remove_own() -> None:
    """Remove what this process has made: for one that must go without unwinding."""
    run = _own().run
    if run is not None and _are_gone(run.token, run.parents):
        run.end()


@contextmanager
def _made(parent: Path, before: str, after: str) -> Iterator[Path]:
    """A new file (``after``: its ending) or directory; where it will be is noted before."""
    run, number = _joined(parent)
    path = parent / f"{before}{run.token}-{number}{after}"
    try:
        path.open("xb").close() if after else path.mkdir(0o700)
        yield path
    finally:
        if _is_gone(path):
            _left(run)


def noted() -> tuple[str, list[str]] | None:
    """Where it is noted what this process has made so far, and where that lies: for ``remove_again``. None: nowhere."""
    run = _own().run
    return None if run is None or run.folder is None else (str(run.folder), [*map(str, run.parents)])


def remove_again(folder: str, parents: Iterable[str]) -> None:
    """Remove what was made in the name of a dead process after others had removed all that is noted in ``folder``."""
    notes, until = Path(folder), time.monotonic() + PATIENCE
    while notes.exists() and time.monotonic() < until:  # others are at it
        time.sleep(OFTEN)
        sweep()
    if not notes.exists():
        _are_gone(_token(notes), map(Path, parents))


def _is_gone(path: Path) -> bool:
    """Remove a file or a directory, no other thing that has taken its place -> whether nothing of it is left."""
    try:
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            shutil.rmtree(path)
        elif stat.S_ISREG(mode):
            path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return True


def _are_gone(token: str, parents: Iterable[Path]) -> bool:
    """Remove what bears a token in some directories -> whether nothing of it is left."""
    form = re.compile(rf"({re.escape(PREFIX)}{token}-\d+|\..*\.{token}-\d+\.part)", re.DOTALL)
    try:
        found = [
            path for parent in parents if parent.is_dir() for path in parent.iterdir() if form.fullmatch(path.name)
        ]
    except OSError:
        return False
    return [_is_gone(path) for path in found].count(False) == 0


# -- the directory of a process --------------------------------------------------------------------


class _Run:
    """What a process has made, and its directory with the lock; without one nobody will know of it."""

    def __init__(self, folder: Path | None = None, lock: Any = None) -> None:
        self.folder, self.lock = folder, lock
        self.token = _token(folder) if folder is not None else os.urandom(8).hex()
        self.parents, self.number, self.there = set[Path](), 0, 0

    def note(self, parent: Path) -> None:
        """Say where something will be; no room for words: it may have some yet."""
        if parent not in self.parents and self.folder is not None:
            with suppress(OSError), (self.folder / "made_in").open("a", encoding="ascii") as file:
                file.write(json.dumps(str(parent)) + "\n")
        self.parents.add(parent)

    def end(self) -> None:
        if self.folder is not None:
            _remove(self.folder, self.lock)
            with suppress(OSError):
                self.folder.parent.rmdir()  # where nobody else has one


class _Process:
    """The run of one process: a fork has no part in its parent's."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.run: _Run | None = None


_PROCESSES = dict[int, _Process]()


def _own() -> _Process:
    return _PROCESSES.setdefault(os.getpid(), _Process())


def _joined(parent: Path) -> tuple[_Run, int]:
    """This process's run, of which one more thing will be there, and its number."""
    own = _own()
    with own.lock:
        run = own.run = own.run or _begun() or _Run()
        run.note(parent)
        run.number, run.there = run.number + 1, run.there + 1
        return run, run.number


def _left(run: _Run) -> None:
    """One thing less is there; with the last of them the run ends."""
    own = _own()
    with own.lock:
        run.there -= 1
        if not run.there and own.run is run:
            own.run = None
            run.end()


def _begun() -> _Run | None:
    """A new run, in the first place that takes its directory."""
    for place in _places():
        for _ in range(5):  # others tidy up: a directory may be gone the moment it was made
            with suppress(OSError, ImportError):
                place.mkdir(0o700, parents=place.parent != temporary_place(), exist_ok=True)
                folder = place / f"{_host()}-{os.urandom(8).hex()}"
                lock = _locked(folder) if is_private(place) else None
                if lock is not None:
                    return _Run(folder, lock)
    return None


def _places() -> Iterator[Path]:
    """Where the directories of runs are, best first."""
    cache = cache_directory()
    if cache is not None:
        yield cache / "runs"
    yield temporary_place() / f"{PREFIX}{_user()}"


def _locked(folder: Path) -> Any:
    """The lock of a run's directory, which is made if need be; None where a living process has it."""
    from filelock import FileLock, Timeout

    folder.mkdir(0o700, exist_ok=True)
    lock = FileLock(folder / "lock", thread_local=False)
    with suppress(Timeout):
        lock.acquire(timeout=0)
        if (folder / "lock").exists():  # whoever had it before may have removed it
            return lock
        lock.release()
    return None


def _sweep_one(folder: Path) -> None:
    """Remove what a process has left, and its directory, if it is dead."""
    lock = _locked(folder)
    if lock is not None:
        if _are_gone(_token(folder), _noted(folder / "made_in")):
            _remove(folder, lock)
        else:
            lock.release()


def _noted(notes: Path) -> Iterator[Path]:
    """The directories that are noted. The last line may be cut."""
    with suppress(FileNotFoundError), notes.open("rb") as file:  # it died before it made anything
        for line in file.read(MAX_NOTES).splitlines():
            with suppress(ValueError, TypeError, RecursionError):
                yield Path(json.loads(line))


def _remove(folder: Path, lock: Any) -> None:
    """Remove a run's directory and let go of it."""
    with suppress(OSError):
        (folder / "made_in").unlink(missing_ok=True)
        try:
            (folder / "lock").unlink()
        except PermissionError:  # Windows removes no file that is open
            lock.release()
            (folder / "lock").unlink()
        folder.rmdir()
    lock.release()


def _token(folder: Path) -> str:
    return folder.name.rpartition("-")[2]


def _user() -> int:
    """The user's number; on Windows, where users have none, 0, as that of every file's owner is."""
    return int(getattr(os, "geteuid", int)())


def _host() -> str:
    """This machine's name: a home may be that of several."""
    import platform

    return re.sub(r"\W", "_", platform.node())
