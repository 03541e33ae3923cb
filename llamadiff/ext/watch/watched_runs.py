"""A watched program as it runs, here or where a runner's Python is: what it writes down comes into a folder here."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import IO, Any, Protocol

from llamadiff.ext.cpus.remote_bootstrap import start_there
from llamadiff.ext.watch.watch_run import COUNTS, GRAPH, OFTEN, WEIGHT, Answers, Bounds, Plan, planned, variables
from llamadiff.ext.watch.watched_ggml import Ggml, asked
from llamadiff.llamacpp.child import last_words
from llamadiff.system.errors import UserError
from llamadiff.system.python_child import nameless_file
from llamadiff.system.started import APART, Process, kill
from llamadiff.system.stops import passed_on
from llamadiff.system.supervised import Supervised, supervise

MOST_WORDS = 1 << 20  # bytes of a line
CHUNK = 1 << 20  # bytes that are read at once
PATIENCE = 5.0  # seconds that a runner may take to end its program


class Watchable(Protocol):
    """A program that is watched: its ``plan``, its ggmls, and what it is told."""

    plan: Plan
    ggmls: dict[tuple[int, int], Ggml]

    def judged(self, total: int) -> None:
        """So many bytes were judged."""

    def end(self) -> tuple[int | None, str, float]:
        """Wait for its end -> its return code, or why it has none, and how many seconds it took."""

    def stop(self) -> None:
        """End it; from any thread."""


class _Here:
    """A program of this machine's."""

    def __init__(self, arguments: Sequence[str], folder: Path, plan: Plan, running: Supervised) -> None:
        self.arguments, self.plan, self.running = arguments, plan, running
        self.answers, self.started = Answers(folder, asked), time.monotonic()
        self.ggmls = self.answers.ggmls

    def judged(self, total: int) -> None:
        self.plan.judged = total

    def end(self) -> tuple[int | None, str, float]:
        while self.running.runs:
            self.answers.give()
            self.running.wait(OFTEN)
        return *_end_of(self.arguments, self.running), time.monotonic() - self.started

    def stop(self) -> None:
        self.running.stop()


@contextmanager
def here(
    arguments: Sequence[str], bounds: Bounds, folder: Path, _runner: str, streams: Mapping[str, Any] | None
) -> Iterator[_Here]:
    """Run a program on this machine; ``streams``: its own, where they are not this process's."""
    with (
        planned(folder, bounds) as plan,
        supervise(arguments, streams, variables(folder)) as running,
        passed_on(running.send),
    ):
        yield _Here(arguments, folder, plan, running)


class _There:
    """A program that a runner's Python runs (watch_remote.py), whose files come into a folder."""

    def __init__(self, runner: str, folder: Path, bounds: Bounds, process: Process, log: IO[bytes]) -> None:
        self.runner, self.folder, self.process, self.log = runner, folder, process, log
        self.plan, self.ggmls = Plan(), dict[tuple[int, int], Ggml]()
        bounds.put_into(self.plan)
        self._voice = Lock()

    def judged(self, total: int) -> None:
        self.plan.judged = total
        self.say(judged=total)

    def say(self, **words: object) -> None:
        assert self.process.stdin is not None
        with self._voice, suppress(OSError, ValueError):  # it has ended
            self.process.stdin.write(json.dumps(words).encode() + b"\n")
            self.process.stdin.flush()

    def end(self) -> tuple[int | None, str, float]:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline(MOST_WORDS):
            try:
                said = json.loads(line)
                if "error" in said:
                    raise UserError(str(said["error"]))
                if "ended" in said:
                    return self._ended(said)
                self._take(said, self.process.stdout)
            except (ValueError, KeyError, TypeError) as error:
                what = f"{type(error).__name__}: {str(error)[:100]}"
                raise UserError(f"runner={self.runner}: says what nobody understands ({what})") from None
        raise UserError(f"runner={self.runner}: ended before the program did{self._last_words()}")

    def stop(self) -> None:
        """It is ended there."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()

    def _take(self, said: Mapping[str, Any], stream: IO[bytes]) -> None:
        if "ggml" in said:
            process, number = said["key"]
            self.ggmls[int(process), int(number)] = Ggml(**said["ggml"])
        elif "stream" in said:
            out = {1: sys.stdout, 2: sys.stderr}[said["stream"]].buffer
            out.write(stream.read(_size(said, MOST_WORDS)))
            out.flush()
        else:
            name = str(said["file"])
            if not (GRAPH.fullmatch(name) or WEIGHT.fullmatch(name)):
                raise ValueError(name[:100])
            self._put(name, _size(said), stream)

    def _put(self, name: str, size: int, stream: IO[bytes]) -> None:
        path = self.folder / f"{name}.part"
        with path.open("xb") as file:
            left = size
            while left and (part := stream.read(min(left, CHUNK))):
                file.write(part)
                left -= len(part)
        if left:
            raise UserError(f"runner={self.runner}: ended in the middle of what it sent{self._last_words()}")
        if GRAPH.fullmatch(name):
            self.plan.written += size
        path.rename(self.folder / name)

    def _ended(self, said: Mapping[str, Any]) -> tuple[int | None, str, float]:
        if said["order"] != sys.byteorder:
            raise UserError(f"runner={self.runner}: its bytes are in another order than this machine's")
        for name in COUNTS:
            setattr(self.plan, name, int(said["counts"][name]))
        return int(said["ended"]), "", float(said["seconds"])

    def _last_words(self) -> str:
        self.log.seek(0)
        return last_words(self.log.read(MOST_WORDS).decode("utf-8", "replace"))


def _size(said: Mapping[str, Any], most: int = sys.maxsize) -> int:
    """How many bytes follow. Raises ValueError for what is no such number."""
    size = said["size"]
    if type(size) is not int or not 0 <= size <= most:
        raise ValueError(f"{str(size)[:20]} bytes")
    return size


@contextmanager
def there(
    arguments: Sequence[str], bounds: Bounds, folder: Path, runner: str, _streams: Mapping[str, Any] | None
) -> Iterator[_There]:
    """Run a program where a runner's Python is. Raises UserError for a runner that is not there."""
    with nameless_file() as log:
        process = start_there(
            runner, main="llamadiff.ext.watch.watch_remote", stderr=log, **APART
        )  # Ctrl-C is passed on
        running = _There(runner, folder, bounds, process, log)
        assert process.stdout is not None
        try:
            running.say(arguments=list(arguments), bounds=asdict(bounds))
            with passed_on(lambda number: running.say(signal=number)):
                yield running
        finally:
            running.stop()
            with suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
            kill(process)
            process.stdout.close()


def _end_of(arguments: Sequence[str], running: Supervised) -> tuple[int | None, str]:
    """The program's return code; or why there is none. Raises UserError for a program that cannot be run."""
    answer = running.answer()
    if "error" in answer:
        raise UserError(f"{arguments[0]}: cannot be run ({answer['error']})")
    code = answer.get("code")
    return (code, "") if isinstance(code, int) else (None, "the process that ran it was killed")
