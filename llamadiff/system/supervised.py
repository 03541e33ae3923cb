"""A foreign command: its supervisor (supervisor.py) ends it with all of its processes, at the latest with this one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from llamadiff.system import python_child
from llamadiff.system.stale_files import temporary_directory
from llamadiff.system.started import APART, Process, kill, start

PATIENCE = 10.0  # seconds that a supervisor may take to end a command
SOON = 0.01  # seconds


class Supervised:
    """A command that runs; ``supervisor`` is the process that has its streams, and ends after it."""

    def __init__(self, supervisor: Process, folder: Path) -> None:
        self.supervisor, self._folder = supervisor, folder

    @property
    def runs(self) -> bool:
        return self.supervisor.poll() is None

    def wait(self, seconds: float) -> None:
        """Until it has ended, but no longer than so."""
        with suppress(subprocess.TimeoutExpired):
            self.supervisor.wait(seconds)

    def stop(self) -> None:
        """End it; from any thread."""
        with suppress(OSError):
            (self._folder / "request").unlink()

    def answer(self) -> dict[str, Any]:
        """Its return ``code``, or an ``error``: why it could not be run; empty if its supervisor was killed."""
        with suppress(OSError, ValueError):
            answer: dict[str, Any] = json.loads((self._folder / "answer").read_bytes())
            return answer
        return {}

    def send(self, number: int) -> None:
        """Pass on a signal that this process got; one from the terminal it has got by itself."""
        if number == signal.SIGINT and _is_in_foreground():
            return
        until = time.monotonic() + PATIENCE
        while self.runs and time.monotonic() < until:
            with suppress(OSError, ValueError):  # it has not begun
                os.kill(int((self._folder / "command").read_bytes()), number)
                return
            time.sleep(SOON)

    def end(self) -> None:
        """End it, and wait for that."""
        self.stop()
        self.wait(PATIENCE)
        kill(self.supervisor)


@contextmanager
def supervise(
    arguments: Sequence[str], streams: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None
) -> Iterator[Supervised]:
    """Run a command that lives no longer than this, with more in its ``environment``.

    One that is given ``streams`` (as Popen is) is out of the terminal's reach; else both are this process's. Raises
    OSError for a TMPDIR that cannot be written.
    """
    with temporary_directory() as folder:
        request = {"arguments": [*arguments], "environment": {**(environment or {})}, "is_apart": streams is not None,
                   "waiting": os.getpid()}  # fmt: skip
        (folder / "request").write_text(json.dumps(request), "utf-8")
        process = start(
            python_child.command("llamadiff.system.supervisor", str(folder)),
            lambda process: Supervised(process, folder).end(), **({} if streams is None else {**streams, **APART}),
        )  # fmt: skip
        running = Supervised(process, folder)
        try:
            yield running
        finally:
            running.end()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with suppress(BrokenPipeError):
                        stream.close()


def _is_in_foreground() -> bool:
    """Whether the keys of a terminal reach this process, and so all of its group."""
    if sys.platform != "win32":
        with suppress(OSError):
            terminal = os.open(os.ctermid(), os.O_RDWR | os.O_NOCTTY)
            try:
                return os.tcgetpgrp(terminal) == os.getpgrp()
            finally:
                os.close(terminal)
    return False
