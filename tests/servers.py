"""A server of a model, in JavaScript: right, with a mistake, or hostile. It shares no code with what is tested."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from optional import program

SERVER = Path(__file__).parent / "ext" / "server" / "proof" / "server.js"
LISTENING = "listening on "


@contextmanager
def started(model: str | Path, *flags: object) -> Iterator[str]:
    """The address of a server of this model, ``http://127.0.0.1:PORT``; it ends with the block.

    ``flags`` are those of server.js: ``"--mistake", "bos-twice"``.
    """
    command = _command(model, "--with-parent", *flags)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, encoding="utf-8") as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith(LISTENING):
                raise RuntimeError(f"{' '.join(command)} did not start: its exit code is {process.wait()}")
            yield f"http://127.0.0.1:{int(line.removeprefix(LISTENING))}"
        finally:
            process.kill()


def mistakes(*kinds: str) -> dict[str, str]:
    """Mistakes that it can make, and a sentence of each; of all kinds, or of tokens, settings or engine."""
    return {each["name"]: each["sentence"] for each in _listed("--list-mistakes") if each["kind"] in kinds or not kinds}


def hostile() -> dict[str, str]:
    """Hostile answers that it can give, and a sentence of each."""
    return {each["name"]: each["sentence"] for each in _listed("--list-hostile")}


@cache
def _listed(flag: str) -> list[dict[str, str]]:
    if program("node") is None:
        return []
    done = subprocess.run(_command(flag), capture_output=True, check=True, text=True, encoding="utf-8")
    listed: list[dict[str, str]] = json.loads(done.stdout)
    return listed


def _command(*words: object) -> list[str]:
    return [program("node") or "node", str(SERVER), *map(str, words)]
