"""A command of the command line: its function, where help lists it, and examples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

JUDGE, FILE, LEARN = PANELS = ("Judge", "The file", "Look up")


@dataclass(frozen=True)
class Command:
    """``function``'s parameters are the command's; ``panel`` is one of PANELS."""

    panel: str
    function: Callable[..., None]
    examples: tuple[str, ...] = ()
