"""Which file is which: SHA-256, without reading the whole into memory; that of a large file is remembered."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from llamadiff.system.errors import UserError
from llamadiff.system.output import write_whole
from llamadiff.system.stale_files import cache_directory

LARGE = 64 << 20  # bytes: what is smaller is hashed in no time
SETTLED = 2.0  # seconds: a file that changed so lately may change again within the same tick of its clock
MOST = 100  # files that are remembered


def file_sha256(path: str | Path) -> str:
    """SHA-256 of a file, hexadecimal.

    A large file's is remembered in the user's cache directory by device, number, size and times of change, of which
    a program cannot set the last: whatever touches the file makes it a new one.
    """
    path = Path(path)
    memory = _memory(path)
    known = _read_remembered(memory)
    if known is not None:
        return known
    with path.open("rb") as file:
        digest = hashlib.sha256()
        for chunk in iter(lambda: file.read(1 << 22), b""):
            digest.update(chunk)
    found = digest.hexdigest()
    if memory is not None and memory == _memory(path):
        _remember(memory, found)
    return found


def model_sha256(files: Sequence[str | Path]) -> str:
    """What tells a model: its file's SHA-256; of one in several parts, that of their SHA-256, a line each."""
    hashes = [file_sha256(file) for file in files]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(f"{h}\n" for h in hashes).encode()).hexdigest()


def is_remembered(path: str | Path) -> bool:
    """Whether a file's hash is there without reading the file."""
    return _read_remembered(_memory(Path(path))) is not None


def _memory(path: Path) -> Path | None:
    """Where the hash of a file as it is now is remembered; None if it is not."""
    about = path.stat()
    changed = max(about.st_mtime_ns, about.st_ctime_ns)
    if about.st_size < LARGE or not 0 <= changed < time.time_ns() - SETTLED * 1e9:
        return None
    key = (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)
    cache = cache_directory()
    return cache / "sha256" / "-".join(f"{part:x}" for part in key) if cache is not None else None


def _read_remembered(memory: Path | None) -> str | None:
    if memory is None:
        return None
    try:
        text = memory.read_text("ascii")
    except (OSError, ValueError):
        return None
    return text if re.fullmatch("[0-9a-f]{64}", text) else None


def _remember(memory: Path, found: str) -> None:
    """Keep a hash; where nothing can be written, it is not kept."""
    with suppress(OSError, UserError):
        memory.parent.mkdir(parents=True, exist_ok=True)
        write_whole(memory, found.encode())
        for old in sorted(memory.parent.iterdir(), key=lambda file: file.stat().st_mtime)[:-MOST]:
            old.unlink()
