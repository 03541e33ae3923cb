"""Which file is which: SHA-256, without reading the whole into memory."""

from __future__ import annotations

import hashlib
from pathlib import Path


def file_sha256(path: str | Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with Path(path).open("rb") as file:
        digest = hashlib.sha256()
        for chunk in iter(lambda: file.read(1 << 22), b""):
            digest.update(chunk)
    return digest.hexdigest()
