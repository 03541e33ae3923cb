"""A command of the command line: its function, where help lists it, and examples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

START, CI, LLAMA_CPP, MODEL = PANELS = ("Start", "In CI", "llama.cpp", "Model")


@dataclass(frozen=True)
class Command:
    """``function``'s parameters are the command's; ``panel`` is one of PANELS."""

    panel: str
    function: Callable[..., None]
    examples: tuple[str, ...] = ()
    takes_program: bool = False  # after the first word that is no option, all words are a program's
