"""Signals that ask a command to stop: each raises Stopped where it finds the command, or when what it ``held`` is done.

A process that was started, and that nobody knows of yet, would outlive a command that is stopped there.
"""

from __future__ import annotations

import _thread
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

# They ask a command to stop: Ctrl-C, a polite kill, a closed terminal; Ctrl-Break on Windows.
SIGNALS: tuple[int, ...] = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK") if hasattr(signal, name)
)
PATIENCE = 2.0  # seconds that stopping may take
SOON = 0.01  # seconds


class Stopped(BaseException):
    """The command was asked to stop: Ctrl-C, SIGTERM, a closed terminal. Cleans up on its way out, as any exception."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__()
        self.number = number


class _Listener:
    """Raises Stopped where a signal finds the command, later if it is held there, and again where that was lost.

    Those that are ``passed`` on stop nothing.
    """

    def __init__(self) -> None:
        self.passed: Callable[[int], None] | None = None
        self.last = -math.inf
        self.holds = 0
        self.waiting: int | None = None

    def listen(self) -> None:
        """Hear the signals, except those that the command was started to ignore (nohup): they wait until ``heeded``."""
        self.last, self.holds, self.waiting = -math.inf, 1, None
        sys.unraisablehook = self.repeat
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self.stop)

    def stop(self, number: int, _frame: FrameType | None = None) -> None:
        if self.passed is not None:
            self.passed(number)
            return
        if self.holds:
            self.waiting = number
            return
        before, self.last = self.last, time.monotonic()
        if self.last - before > PATIENCE:  # a second signal must not interrupt the cleaning up
            raise Stopped(number)

    def repeat(self, lost: sys.UnraisableHookArgs) -> None:
        """Python prints, and drops, what is raised in a destructor or while a module's lock is let go."""
        if isinstance(lost.exc_value, Stopped):
            self.last = -math.inf
            threading.Timer(SOON, _send, (lost.exc_value.number,)).start()
        else:
            sys.__unraisablehook__(lost)

    def let_go(self) -> None:
        self.holds -= 1
        if not self.holds and self.waiting is not None:
            number, self.waiting = self.waiting, None
            self.stop(number)


def _send(number: int) -> None:
    """A signal to this process; on Windows a kill would end it, whatever the signal."""
    _thread.interrupt_main(signal.Signals(number)) if sys.platform == "win32" else os.kill(os.getpid(), number)


_listener = _Listener()
listen = _listener.listen


@contextmanager
def heeded() -> Iterator[None]:
    """Signals stop what is done in this, and nothing outside of it."""
    _listener.let_go()
    try:
        yield
    finally:
        _listener.holds += 1


@contextmanager
def passed_on(to: Callable[[int], None]) -> Iterator[None]:
    """Signals are told to somebody else in this, and stop nothing."""
    before, _listener.passed = _listener.passed, to
    try:
        yield
    finally:
        _listener.passed = before


@contextmanager
def held() -> Iterator[None]:
    """Signals wait until the end of this. Threads other than the main one are never interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _listener.holds += 1
    try:
        yield
    finally:
        _listener.let_go()
