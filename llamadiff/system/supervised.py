"""Starts and ends a supervisor (supervisor.py), and with it a foreign command and all of its processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from llamadiff.system import python_child
from llamadiff.system.started import Process, kill, start
from llamadiff.system.stops import passed_on
from llamadiff.system.supervisor import PATIENCE


def end(supervisor: Process) -> None:
    """Give it the time to end the command's processes."""
    assert supervisor.stdin is not None
    with suppress(BrokenPipeError):
        supervisor.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        supervisor.wait(2 * PATIENCE)
    kill(supervisor)


class Program:
    """A program of the user's: its streams, its terminal and its signals are those of this process."""

    def __init__(self, supervisor: Process) -> None:
        self._supervisor = supervisor

    @property
    def runs(self) -> bool:
        return self._supervisor.poll() is None

    def wait(self, seconds: float) -> None:
        """Until it has ended, but no longer than so."""
        with suppress(subprocess.TimeoutExpired):
            self._supervisor.wait(seconds)

    def stop(self) -> None:
        """End it; from any thread."""
        assert self._supervisor.stdin is not None
        with suppress(OSError):
            self._supervisor.stdin.close()

    def answer(self) -> dict[str, object]:
        """Its return code, or why it could not be run; empty if its supervisor was killed."""
        assert self._supervisor.stdout is not None
        said: dict[str, object] = json.loads(self._supervisor.stdout.read() or "{}")
        return said

    def told(self, number: int) -> None:
        """A signal that this process got; one from the terminal it has got by itself."""
        assert self._supervisor.stdin is not None
        if number == signal.SIGINT and _is_in_foreground():
            return
        with suppress(BrokenPipeError, ValueError):
            self._supervisor.stdin.write(f"{number}\n".encode())
            self._supervisor.stdin.flush()


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


@contextmanager
def program(arguments: Sequence[str], environment: Mapping[str, str]) -> Iterator[Program]:
    """Run a program with more in its ``environment``: signals are its own, and it lives no longer than this."""
    streams = [os.dup(number) for number in range(3)]
    request = {"arguments": list(arguments), "streams": streams, "environment": dict(environment)}
    try:
        supervisor = start(
            python_child.command("llamadiff.system.supervisor"), end,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=streams,
        )  # fmt: skip
    finally:
        for number in streams:
            os.close(number)
    assert supervisor.stdin is not None
    assert supervisor.stdout is not None
    running = Program(supervisor)
    try:
        with suppress(BrokenPipeError):
            supervisor.stdin.write(json.dumps(request).encode() + b"\n")
            supervisor.stdin.flush()
        with passed_on(running.told):
            yield running
    finally:
        end(supervisor)
        supervisor.stdout.close()
