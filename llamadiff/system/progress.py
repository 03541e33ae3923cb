"""How work that takes long says what it is doing."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receives each phase in words and, where it is known, how much of it is done."""

    def __call__(self, phase: str, done: int = 0, of: int = 0) -> None: ...


def silent(phase: str, done: int = 0, of: int = 0) -> None:
    """Tells nobody."""
