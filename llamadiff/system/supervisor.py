"""A foreign command's parent: it runs the command, and ends all of its processes when it ends, or when nobody waits.

It has a directory in common with whoever waits (supervised.py). ``request`` is there as long as somebody wants the
command and says what to run; ``command`` gets its number, ``answer`` how it ended. The command has this process's
streams.

A process whose parent has died was seen before, while that lived. On Linux none escapes: orphans become children of
this process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from llamadiff.system.python_child import adopt_orphans, die_with_parent
from llamadiff.system.stale_files import sweep
from llamadiff.system.started import APART
from llamadiff.system.stops import SIGNALS

if TYPE_CHECKING:
    import psutil  # imported below when the command has begun

OFTEN, SELDOM = 0.02, 1.0  # seconds between two looks: at its own child; at all processes, in the end
PATIENCE = 5.0  # seconds that processes may take to die


def main(folder: str) -> None:
    """Run one command."""
    adopt_orphans()
    place = Path(folder)
    with suppress(FileNotFoundError):  # nobody waits
        answer = _run_command(place, **json.loads((place / "request").read_bytes()))
        (place / "answer").write_text(json.dumps(answer), "utf-8")


def _run_command(
    place: Path, arguments: list[str], environment: dict[str, str], is_apart: bool, waiting: int
) -> dict[str, str | int]:
    """The command's return code, or why it cannot be run. ``waiting`` is the process that waits for it."""
    try:
        command = subprocess.Popen(  # noqa: S603
            arguments, preexec_fn=die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509 - one thread
            env={**os.environ, **environment}, **(APART if is_apart else {}),
        )  # fmt: skip
    except (OSError, ValueError) as error:
        return {"error": getattr(error, "strerror", None) or str(error)}
    for number in SIGNALS:  # the terminal's are the command's
        signal.signal(number, signal.SIG_IGN)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # what the command does not read, nobody does
    with suppress(FileNotFoundError):
        (place / "command").write_text(str(command.pid), "utf-8")
    family, due, pause = Family(), 0.0, OFTEN
    while command.poll() is None and _is_parent(waiting) and (place / "request").exists():
        now = time.monotonic()
        if now >= due:
            family.look()
            due, pause = now + pause, min(1.5 * pause, SELDOM)
        time.sleep(OFTEN)
    family.end()
    command.wait()
    if not _is_parent(waiting):
        sweep()
    return {"code": command.returncode}


def _is_parent(process: int) -> bool:
    import psutil

    parent = psutil.Process().parent()
    return parent is not None and parent.pid == process


class Family:
    """The descendants of this process: those that are, and those that were when somebody looked."""

    def __init__(self) -> None:
        self.seen: set[psutil.Process] = set()

    def look(self) -> list[psutil.Process]:
        """Those that live, the newest included."""
        import psutil

        for process in (psutil.Process(), *self.seen):
            with suppress(psutil.Error):
                self.seen.update(process.children(recursive=True))
        self.seen = set(filter(_lives, self.seen))
        return list(self.seen)

    def end(self) -> None:
        """Kill them, and those that they start meanwhile."""
        import psutil

        until = time.monotonic() + PATIENCE
        while (found := self.look()) and time.monotonic() < until:
            for process in found:
                with suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(found, PATIENCE / 10)


def _lives(process: psutil.Process) -> bool:
    import psutil

    with suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False
