"""Signals that ask a command to stop: each raises Stopped where the command is, or at the end of ``hold_signals``.

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

# They ask a command to stop: Ctrl-C, a polite kill, a closed terminal; Ctrl-Break on Windows.
SIGNALS: tuple[int, ...] = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK") if hasattr(signal, name)
)
PATIENCE = 2.0  # seconds that stopping may take
SOON = 0.01  # seconds
_waiting = list[int]()  # signals that nothing was done about yet
_hearers = list[Callable[[int], object]]()  # the last of them is given each signal
_last = [-math.inf]  # when a command was stopped


class Stopped(BaseException):
    """The command was asked to stop: Ctrl-C, SIGTERM, a closed terminal. Cleans up on its way out, as any exception."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__()
        self.number = number


def listen() -> None:
    """Hear the signals but those that the command was started to ignore (nohup): they wait until ``heed_signals``."""
    _waiting.clear()
    _hearers[:], _last[:] = [_waiting.append], [-math.inf]
    sys.unraisablehook = _repeat
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: _hearers[-1](number))


@contextmanager
def passed_on(to: Callable[[int], object]) -> Iterator[None]:
    """Signals are told to somebody else in this, and stop nothing."""
    _hearers.append(to)
    try:
        yield
    finally:
        _hearers.pop()


@contextmanager
def heed_signals() -> Iterator[None]:
    """Signals stop what is done in this, and nothing outside of it."""
    with passed_on(_stop):
        _hear_waiting()
        yield


@contextmanager
def hold_signals() -> Iterator[None]:
    """Signals wait until the end of this. Threads other than the main one are never interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        with passed_on(_waiting.append):
            yield
    finally:
        _hear_waiting()


def _hear_waiting() -> None:
    """Give a signal that waited to whoever hears it now."""
    if _waiting and _hearers:
        number = _waiting[-1]
        _waiting.clear()
        _hearers[-1](number)


def _stop(number: int) -> None:
    before, _last[0] = _last[0], time.monotonic()
    if _last[0] - before > PATIENCE:  # a second signal must not interrupt the cleaning up
        raise Stopped(number)


def _repeat(lost: sys.UnraisableHookArgs) -> None:
    """Stop again: Python prints, and drops, what is raised in a destructor or while a module's lock is let go."""
    if isinstance(lost.exc_value, Stopped):
        _last[0] = -math.inf
        threading.Timer(SOON, _send, (lost.exc_value.number,)).start()
    else:
        sys.__unraisablehook__(lost)


def _send(number: int) -> None:
    """Send a signal to this process; on Windows a kill would end it, whatever the signal."""
    _thread.interrupt_main(signal.Signals(number)) if sys.platform == "win32" else os.kill(os.getpid(), number)
