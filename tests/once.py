"""What is dear to make is made once a run, whichever of its processes asks first."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def once(temporary: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that all processes of this run share, filled by ``make``: the others wait for it."""
    own = temporary.getbasetemp()
    parent = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    folder, partial = parent / name, parent / f"{name}.part"
    with (parent / f"{name}.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            partial.mkdir(exist_ok=True)  # where another one failed
            make(partial)
            partial.rename(folder)
    return folder
