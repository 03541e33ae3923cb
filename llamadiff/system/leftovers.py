"""Temporary files of a process: listed in a ledger that it keeps locked, and removed by another if it was killed.

A process that makes its first temporary file or directory begins a ledger: a file that it keeps locked (flock), and
names each of them in. The system lets go of the lock when the process dies, however it dies; so a ledger that can be
locked is a dead process's, and what it names is litter. The ledger's name is random, and part of every name in it.

Ledgers lie in the user's cache directory, or, where that cannot be written, in one of the user's own in TMPDIR.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PREFIX = "llamadiff-"  # of scratch directories
MAX_LEDGER = 1 << 26  # bytes
LONGEST = 200  # bytes of a file's own name that its temporary name repeats


@contextmanager
def temporary_file(path: Path) -> Iterator[Path]:
    """A new, empty file beside ``path``, to be written and renamed; it is gone at the end if it still has that name.

    Raises OSError if it cannot be made.
    """
    path = Path(os.path.realpath(path))  # a link stays one: its target is what is replaced
    name = os.fsdecode(os.fsencode(path.name)[:LONGEST])
    with _litter(path.parent, f".{name}.", ".part") as made:
        yield made


@contextmanager
def temporary_directory(parent: Path | None = None) -> Iterator[Path]:
    """A new directory in TMPDIR, or in ``parent``, that nobody else can read, gone at the end.

    Raises OSError if it cannot be made.
    """
    with _litter(Path(os.path.realpath(parent)) if parent else temporary_place(), PREFIX, "") as made:
        yield made


def temporary_place() -> Path:
    """Where scratch directories are made."""
    return Path(os.path.realpath(os.environ.get("TMPDIR") or "/tmp"))  # noqa: S108


def cache_directory() -> Path | None:
    """Where this user's files of llamadiff are kept from run to run; None where nobody is at home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llamadiff"
    except RuntimeError:
        return None


def sweep() -> None:
    """Remove what dead processes of this user left on this machine. What cannot be removed is tried again next time."""
    for place in _places():
        with suppress(OSError):
            _check_private(place)
            for name in os.listdir(place):
                with suppress(OSError, ValueError, RecursionError):
                    _sweep_one(place / name)
            os.rmdir(place)  # where nothing is left in it


def remove_own() -> None:
    """Remove what this process has made: for one that must go without unwinding."""
    ledger = _process.ledger
    if ledger is not None:
        for path, identity in list(ledger.made.items()):
            if _is_gone(path, identity):
                ledger.strike(path)


@contextmanager
def _litter(parent: Path, before: str, after: str) -> Iterator[Path]:
    """A file (``after``: its ending) or a directory that is written down before it is made."""
    path, ledger = _announced(parent, before, after)
    identity = None
    try:
        identity = _make(path, is_file=bool(after))
        if ledger is not None:
            ledger.note(path, identity)
        yield path
    finally:
        if _is_gone(path, identity) and ledger is not None:
            ledger.strike(path)


def _make(path: Path, is_file: bool) -> tuple[int, int]:
    """Make a file or directory that was not there -> its device and number."""
    if is_file:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    else:
        os.mkdir(path, 0o700)
    about = os.lstat(path)
    return about.st_dev, about.st_ino


def _is_gone(path: Path, identity: tuple[int, int] | None) -> bool:
    """Remove what has this name, if it is what was made under it -> whether nothing of it is left.

    Without ``identity`` its maker died before writing that down: it is empty, or it is something else.
    """
    try:
        about = os.lstat(path)
        if about.st_uid != os.geteuid() or identity not in (None, (about.st_dev, about.st_ino)):
            return True  # another thing of that name
        if stat.S_ISDIR(about.st_mode):
            os.rmdir(path) if identity is None else shutil.rmtree(path)
        elif stat.S_ISREG(about.st_mode) and (identity is not None or about.st_size == 0):
            os.unlink(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return True


# -- ledgers ---------------------------------------------------------------------------------------


class _Ledger:
    """This process's own. ``made``: path -> device and number, None before it is there."""

    def __init__(self, path: Path, file: int) -> None:
        self.path, self.file, self.numbers = path, file, 0
        self.made: dict[Path, tuple[int, int] | None] = {}
        self._write({"host": os.uname().nodename})

    def announce(self, parent: Path, before: str, after: str) -> Path:
        self.numbers += 1
        path = parent / f"{before}{self.path.name}-{self.numbers}{after}"
        self._write({"path": str(path)})
        self.made[path] = None
        return path

    def note(self, path: Path, identity: tuple[int, int]) -> None:
        self.made[path] = identity
        with suppress(OSError):  # no room for words: what was made may have some yet
            self._write({"path": str(path), "device": identity[0], "number": identity[1]})

    def strike(self, path: Path) -> None:
        """Forget what is gone; when nothing is left, the ledger ends."""
        with _process.lock:
            self.made.pop(path, None)
            if not self.made and _process.ledger is self:
                _process.ledger = None
                with suppress(OSError):
                    self.path.unlink()
                    os.rmdir(self.path.parent)  # where nobody else has one
                os.close(self.file)

    def _write(self, line: dict[str, Any]) -> None:
        os.write(self.file, json.dumps(line).encode() + b"\n")


class _Process:
    """This process's ledger, while it has one."""

    def __init__(self) -> None:
        self.ledger: _Ledger | None = None
        self.lock = threading.RLock()


_process = _Process()


def _forget_parents() -> None:
    """A fork has no part in its parent's ledger: were it to keep the lock, the parent would never count as dead."""
    if _process.ledger is not None:
        os.close(_process.ledger.file)
    _process.ledger, _process.lock = None, threading.RLock()


os.register_at_fork(after_in_child=_forget_parents)


def _announced(parent: Path, before: str, after: str) -> tuple[Path, _Ledger | None]:
    """A name that nothing has, written down where there is a place for that."""
    with _process.lock:
        with suppress(OSError):
            ledger = _process.ledger = _process.ledger or _begun()
            if ledger is not None:
                return ledger.announce(parent, before, after), ledger
        return parent / f"{before}{os.urandom(8).hex()}-0{after}", None


def _begun() -> _Ledger | None:
    """A new ledger, in the first place that takes one."""
    for place in _places():
        for _ in range(5):  # others tidy up: a directory, or an unlocked ledger, may be gone the moment it was made
            with suppress(OSError):
                place.mkdir(0o700, parents=place.parent != temporary_place(), exist_ok=True)
                _check_private(place)
                path = place / os.urandom(8).hex()
                file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_APPEND, 0o600)
                if _is_locked(path, file):
                    return _Ledger(path, file)
                os.close(file)
    return None


def _places() -> Iterator[Path]:
    """Where ledgers are kept, best first."""
    cache = cache_directory()
    if cache is not None:
        yield cache / "processes"
    yield temporary_place() / f"{PREFIX}{os.geteuid()}"


def _check_private(place: Path) -> None:
    """Raise OSError for a directory of ledgers that another user could have written to, or put there."""
    about = os.lstat(place)
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o022:
        raise OSError(f"{place}: not this user's alone")


def _is_locked(path: Path, file: int) -> bool:
    """Lock a ledger, if no living process has it, and if it still has its name."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file), os.lstat(path))
    except OSError:
        return False


def _sweep_one(path: Path) -> None:
    """Remove what a ledger names, and then the ledger, if its process is dead and was one of this machine."""
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or not _is_locked(path, file):
            return
        host, made = _read(os.read(file, min(about.st_size, MAX_LEDGER)))
        if host not in (None, os.uname().nodename):
            return
        gone = [_is_gone(one, identity) for one, identity in made.items() if _is_named_by(path.name, one)]
        if all(gone):
            os.unlink(path)
    finally:
        os.close(file)


def _read(data: bytes) -> tuple[str | None, dict[Path, tuple[int, int] | None]]:
    """A ledger's lines -> the machine, and what was made there. The last line may be cut."""
    host, made = None, dict[Path, tuple[int, int] | None]()
    for text in data.splitlines():
        with suppress(ValueError, KeyError, TypeError):
            line = json.loads(text)
            if "host" in line:
                host = str(line["host"])
            else:
                identity = (int(line["device"]), int(line["number"])) if "number" in line else None
                made[Path(line["path"])] = identity
    return host, made


def _is_named_by(ledger: str, path: Path) -> bool:
    """Whether a name is one that the process of this ledger gave."""
    before, found, after = path.name.rpartition(f"{ledger}-")
    if not (found and path.is_absolute()):
        return False
    is_file = before.startswith(".") and before.endswith(".") and after.endswith(".part")
    return after.removesuffix(".part").isdigit() and (is_file or (before == PREFIX and after.isdigit()))
