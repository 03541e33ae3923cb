"""llamadiff asked about a part that `make backends` has made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tools.backends import FOUND
from tools.parts import Usage

TOKENS = tuple(1 + 37 * number % 120 for number in range(64))  # within every vocabulary


def asked(usage: Usage, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llamadiff", *map(str, words), *usage.options]
    return subprocess.run(
        command, env={**os.environ, **usage.environment}, capture_output=True, text=True, check=False, encoding="utf-8"
    )


def tokens(count: int) -> str:
    """So many, as --tokens takes them."""
    return ",".join(map(str, TOKENS[:count]))


def note(part: str, given: int, model: str, report: dict, way: str = "") -> list[str]:
    """Keep what was found for the table -> the ops that are wrong."""
    wrong = [tap["op"] for tap in report["taps"] if tap["verdict"] == "wrong"]
    row = {"part": part, "tokens": given, "way": way, "model": model, "nodes": len(report["taps"]),
           "verdict": report["verdict"], "wrong": wrong}  # fmt: skip
    with FOUND.open("a", encoding="utf-8") as table:
        table.write(json.dumps(row) + "\n")
    return wrong


def without_its_tokenizer(path: Path, folder: Path) -> Path:
    """A copy of a model; where its tokenizer is that of llama.cpp's tests, which older versions lack, with none."""
    data, key = path.read_bytes(), b"tokenizer.ggml.model\x08\0\0\0\x04\0\0\0\0\0\0\0"
    copy = folder / path.name
    copy.write_bytes(data.replace(key + b"test", key + b"none", 1))
    return copy
