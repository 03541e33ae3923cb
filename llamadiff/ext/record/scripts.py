"""What runs a program that is a script: the interpreter that its first line names."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

SHEBANG = 256  # bytes of a first line, which is all that Linux reads of it
_VARIABLE = re.compile(r"\w+=\S*")


def shebang_of(path: Path) -> list[str]:
    """The interpreter of a script and its own options; nothing of what is no script."""
    with path.open("rb") as file:
        first = file.read(SHEBANG)
    if not first.startswith(b"#!"):
        return []
    words = first[2:].split(b"\n")[0].decode("utf-8", "replace").split()
    if words and Path(words[0]).name == "env":  # options of its own (-S), and variables, come first
        words = words[1:]
        while words and (words[0].startswith("-") or _VARIABLE.fullmatch(words[0])):
            words = words[1:]
    return [shutil.which(words[0]) or words[0], *words[1:]] if words else []


def runners_of(path: Path) -> set[str]:
    """Names of what runs a program: its own, its file's, that of its interpreter."""
    return {path.name, path.resolve().name, *(Path(word).name for word in shebang_of(path)[:1])}


def title_of(words: Sequence[str]) -> str:
    """What a script is called: itself, or what its interpreter is given to run."""
    if Path(words[0]).suffix or len(words) == 1:
        return Path(words[0]).name
    named = (word for before, word in pairwise(words) if not word.startswith("-") and before not in ("-W", "-X"))
    return Path(next(named, words[0])).name
