"""Reads files: regular ones, or pipes with data in them, and no more bytes than can be meant."""

from __future__ import annotations

import os
import select
import stat
import time
from pathlib import Path

from llamadiff.system.errors import UserError

OPENED = 0.5  # seconds within which somebody must write to a pipe
SILENCE = 10.0  # seconds that whoever writes to it may pause
_AT_ONCE: int = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)  # no wait for a pipe; no CR LF made LF
_KINDS = (
    (stat.S_ISDIR, "a directory"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"),
)  # fmt: skip


def kind_of(path: Path) -> str:
    """What a path leads to, in words; empty for a regular file, or where nothing can be known."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return ""
    return next((words for fits, words in _KINDS if fits(mode)), "")


def check_regular(path: Path, meant: str) -> None:
    """Raise UserError for a path that leads to no regular file; ``meant`` says what it should be."""
    kind = kind_of(path)
    if kind:
        raise UserError(f"{path}: is {kind}, no regular file; give {meant}")


def read_text(path: Path, most: int, meant: str) -> str:
    """The text of a file of up to ``most`` bytes, UTF-8. Raises UserError as ``read_bytes`` does."""
    try:
        return read_bytes(path, most, meant).decode()
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not text (UTF-8); give {meant}") from None


def read_bytes(path: Path, most: int, meant: str) -> bytes:
    """A file or a pipe whole. Raises UserError for what is neither, cannot be read, is longer, or says nothing."""
    if kind_of(path) != "a pipe":
        check_regular(path, meant)
    try:
        with open(os.open(path, os.O_RDONLY | _AT_ONCE), "rb", buffering=0) as stream:
            is_pipe = stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)
            data = _read_pipe(path, stream.fileno(), most) if is_pipe else _read_file(stream.fileno(), most)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give {meant}") from None
    if len(data) > most:
        raise UserError(f"{path}: more than {_size(most)}; give {meant}")
    return data


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"


def _read_file(descriptor: int, most: int) -> bytes:
    """Up to one byte more than ``most``."""
    parts, left = [], most + 1
    while left and (part := os.read(descriptor, min(left, 1 << 20))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _read_pipe(path: Path, descriptor: int, most: int) -> bytes:
    """The same of a pipe, waiting for whoever writes to it, but not for long."""
    parts, left, heard = list[bytes](), most + 1, time.monotonic()
    while left:
        try:
            part = os.read(descriptor, min(left, 1 << 20))
        except BlockingIOError:  # somebody holds the other end, and has not written yet
            if not select.select([descriptor], [], [], SILENCE)[0]:
                raise UserError(f"{path}: is a pipe, out of which nothing came for {SILENCE:g} s") from None
            continue
        if part:
            parts.append(part)
            left -= len(part)
        elif parts or time.monotonic() - heard > OPENED:
            break
        else:
            time.sleep(0.01)
    if not parts:
        raise UserError(f"{path}: is a pipe that nobody writes to; give a regular file")
    return b"".join(parts)
