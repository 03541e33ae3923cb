"""A Python program, run in its own interpreter by ``python_agent.py``, which keeps the arrays that it binds.

Runs in a process of its own, which lives no longer than whoever wants the log (``supervise``).
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from llamadiff.ext.record.log import SPANS
from llamadiff.ext.record.scripts import shebang_of

AGENT = Path(__file__).with_name("python_agent.py")
WITH_WORD = "WX"  # options of Python behind which a word may follow
ENDS = "mc"  # and those with which its own options end


def main(folder: str, most: str, *words: str) -> None:
    """Run a program, keep ``most`` bytes of its arrays in ``folder``."""
    place = Path(folder)
    options, program = split_options(with_interpreter(words))
    code, error = 0, ""
    if not program or program[0] == "-":
        error = "no program behind python: expected python engine.py, or python -m engine"
    else:
        try:
            code = subprocess.call([*options, str(AGENT), folder, most, options[0], *program])  # noqa: S603
        except OSError as reason:
            error = f"{options[0]}: {reason.strerror}"
    close_log(place, code, error)


def close_log(folder: Path, code: int, error: str) -> None:
    """Say what is to be known of a log that the agent has written, as far as it came."""
    for name in ("spans", "words"):
        (folder / name).touch()
    spans = np.frombuffer(_whole((folder / "spans").read_bytes(), SPANS.itemsize), SPANS)
    os.truncate(folder / "spans", spans.nbytes)
    os.truncate(folder / "words", 4 * int(spans["words"].sum(dtype=np.int64)))
    about = {"stops": int(spans["stop"].max()) + 1 if len(spans) else 0, "code": code, "error": error}
    (folder / "about").write_text(json.dumps(about), "utf-8")


def _whole(raw: bytes, size: int) -> bytes:
    return raw[: len(raw) - len(raw) % size]


def with_interpreter(words: Sequence[str]) -> list[str]:
    """The words of a program: of a script, with its interpreter before them."""
    return [*shebang_of(Path(words[0])), *words]


def split_options(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """A Python with its own options, and the program: a script, or -m or -c with its word, and its arguments."""
    options, rest = [words[0]], list(words[1:])
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word == "-":
            return options, [word, *rest]
        if word.startswith("--"):
            options += [word, *rest[:1]] if word == "--check-hash-based-pycs" else [word]
            del rest[: int(word == "--check-hash-based-pycs")]
            continue
        for place, letter in enumerate(word[1:], 1):
            if letter in WITH_WORD:
                options += [word] if word[place + 1 :] else [word, *rest[:1]]
                del rest[: int(not word[place + 1 :])]
                break
            if letter in ENDS:
                options += [word[:place]] if place > 1 else []
                given = [word[place + 1 :]] if word[place + 1 :] else rest[:1]
                return options, [f"-{letter}", *given, *rest[0 if word[place + 1 :] else 1 :]] if given else []
        else:
            options.append(word)
    return options, []
