"""The same work on many things, in processes side by side that live no longer than this one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from llamadiff.system.leftovers import remove_own

Given = TypeVar("Given")
Made = TypeVar("Made")


def cores() -> int:
    """How many processes can run at a time."""
    return os.cpu_count() or 1


def side_by_side(work: Callable[[Given], Made], things: Sequence[Given], processes: int) -> Iterator[Made]:
    """What ``work``, a function of a module, makes of each thing, in their order, as soon as it is there.

    One process, or one thing: the work is done here. Where the caller stops asking, or is stopped, the others end.
    """
    if min(processes, len(things)) <= 1:
        yield from map(work, things)
        return
    context = multiprocessing.get_context("spawn")  # a fork would share locks of threads that it does not have
    with _deaf_to_interrupts():
        pool = context.Pool(min(processes, len(things)), _leave_when_told)
    with pool:
        yield from pool.imap(work, things)


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """What is started meanwhile does not heed Ctrl-C, which reaches every process of a terminal: its parent does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leave_when_told() -> None:
    """In a worker: what it has made for the time being goes with it."""

    def leave(number: int, frame: FrameType | None) -> None:
        remove_own()
        os._exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
