"""How tests wait: for what they have caused, however long it takes. What never comes is a hang, and fails.

No other module of tests looks at a clock or sleeps (house/test_time.py).
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Any, TypeVar

HANG = 300.0  # seconds after which nothing comes any more, however busy the machine is
BRIEF = 0.5  # seconds of patience with what never answers: any number of them shows the same
Found = TypeVar("Found")


def eventually(look: Callable[[], Found], running: subprocess.Popen[Any] | None = None) -> Found:
    """What ``look`` finds at last. ``running``: a process that is to live until then."""
    until = time.monotonic() + HANG
    while True:
        ended = running.poll() if running is not None else None
        if found := look():
            return found
        assert ended is None, f"it ended before, with {ended}"
        assert time.monotonic() < until, "it never came"
        time.sleep(0.01)


class Clock:
    """In place of the module ``time``: it goes on when somebody sleeps, and a ``step`` whenever somebody looks."""

    def __init__(self, step: float = 0.0) -> None:
        self.now, self.step = 0.0, step

    def monotonic(self) -> float:
        self.now += self.step
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
