"""Processes that a command starts: none outlives it, whatever finds the command wherever."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llamadiff.system.stops import hold_signals

Process = subprocess.Popen[Any]
End = Callable[[Process], None]

# What Ctrl-C of the terminal does not reach.
APART: dict[str, Any] = {"start_new_session": True}
if sys.platform == "win32":
    APART = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
_STARTED = list[tuple[Process, End]]()


def start(arguments: Sequence[str], end: End, **streams: Any) -> Process:
    """A process, which ``end`` ends: whoever starts it calls that, or else the command's end does. Raises OSError."""
    with hold_signals():
        process: Process = subprocess.Popen(arguments, **streams)  # noqa: S603
        _STARTED[:] = [(other, its_end) for other, its_end in _STARTED if other.returncode is None]
        _STARTED.append((process, end))
    return process


@contextmanager
def all_ended() -> Iterator[None]:
    """What was started in this and still runs is ended: there is nobody else who would."""
    others, _STARTED[:] = _STARTED[:], []
    try:
        yield
    finally:
        for process, end in reversed(_STARTED):
            end(process)
        _STARTED[:] = others


def kill(process: Process) -> None:
    """End a process that has nothing to clean up."""
    if process.poll() is None:
        process.kill()
        process.wait()
