"""Child processes: another Python that imports what this one imports, and that lives no longer than it."""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_FAULTS = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGSYS, signal.SIGTRAP)
_CHUNK = 1 << 16
_DYING = 1.0  # seconds that a process takes to die, at most


def command(module: str, *words: str) -> list[str]:
    """The command line that runs ``main(*words)`` of a module of this package."""
    given = ", ".join(map(ascii, words))
    code = f"import sys; sys.path[:] = sys.argv[1:]; from {module} import main; main({given})"
    return [sys.executable, "-c", code, *sys.path]


def how_it_ended(code: int) -> str:
    """The return code of a process, in words: ``died of SIGSEGV``, ``was killed by signal 15 (SIGTERM)``."""
    if code >= 0:
        return f"ended with exit code {code}"
    return f"died of {signal_name(-code)}" if is_fault(code) else f"was killed by signal {-code} ({signal_name(-code)})"


def is_fault(code: int) -> bool:
    """Whether a process that ended so did it itself; no such signal comes from outside, as a rule."""
    return code >= 0 or -code in _FAULTS


def signal_name(number: int) -> str:
    """SIGKILL for 9; real-time signals have no name of their own."""
    return signal.Signals(number).name if number in set(signal.Signals) else "a real-time signal"


def asked(leave: Callable[[], None]) -> queue.Queue[str]:
    """In a child: watch standard input from now on -> its lines.

    The parent keeps its end open as long as it lives. When it is closed, by the parent or by its death, the child calls
    ``leave`` and ends, whatever it is doing.
    """
    lines, parent = queue.Queue[str](), os.getppid()

    def watch() -> None:
        heard = b""
        while chunk := os.read(0, _CHUNK):
            *whole, heard = (heard + chunk).split(b"\n")
            for line in whole:
                lines.put(line.decode())
        _await_end(parent)
        leave()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    return lines


def _await_end(parent: int) -> None:
    """A process that dies closes its files one by one: until it has, what it has locked counts as a living one's."""
    until = time.monotonic() + _DYING
    while os.getppid() == parent and time.monotonic() < until:
        time.sleep(0.001)


def die_with_parent() -> None:
    """In a child that cannot watch its input: be killed when the parent's thread that made it ends (Linux)."""
    _control(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parents die, wherever they hide (Linux)."""
    _control(_PR_SET_CHILD_SUBREAPER, 1)


def _control(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
