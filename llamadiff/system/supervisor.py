"""A foreign command's parent: it runs the command, and ends all of its processes when it ends, or when nobody waits.

The request is one JSON line on standard input, which stays open as long as somebody waits for the command; the answer
is one JSON line on standard output. What the command prints goes to standard error.

A process of the command that has left its session is found on Linux alone: there, orphans become children of this one.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from llamadiff.system import leftovers
from llamadiff.system.python_child import adopt_orphans, die_with_parent

OFTEN = 0.02  # seconds between two looks
PATIENCE = 5.0  # seconds that processes may take to die


def main() -> None:
    """Run one command."""
    adopt_orphans()
    line = sys.stdin.buffer.readline()
    if line:
        sys.stdout.write(json.dumps(_run(json.loads(line)["arguments"])) + "\n")


def _run(arguments: list[str]) -> dict[str, Any]:
    """The command's return code, or why it cannot be run."""
    try:
        command = subprocess.Popen(  # noqa: S603
            arguments, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - there is one thread here
        )  # fmt: skip
    except (OSError, ValueError) as error:
        return {"error": getattr(error, "strerror", None) or str(error)}
    while command.poll() is None and not _is_alone():
        time.sleep(OFTEN)
    _end(command)
    if _is_alone():
        leftovers.sweep()
    return {"code": command.returncode}


def _is_alone() -> bool:
    """Whether nobody waits any more: standard input has ended."""
    return bool(select.select([0], [], [], 0)[0]) and not os.read(0, 1)


def _end(command: subprocess.Popen[bytes]) -> None:
    """Kill the command's session, then every child, until there is none: the children of the dead are ours in turn."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(command.pid, signal.SIGKILL)
    command.wait()
    started = time.monotonic()
    while time.monotonic() - started < PATIENCE:
        for child in _children():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def _children() -> Iterator[int]:
    """The processes whose parent this one is; none where the system has no /proc."""
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit() and _parent(name) == os.getpid():
                yield int(name)


def _parent(process: str) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{process}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[1])  # state, then the parent; the name before may hold all
    return None
