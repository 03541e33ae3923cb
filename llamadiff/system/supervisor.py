"""A foreign command's parent: it runs the command, and ends all of its processes when it ends, or when nobody waits.

The request is one JSON line on standard input, which stays open as long as somebody waits for the command; the answer
is one JSON line on standard output. What the command prints goes to standard error. Of one that ``talks`` all further
lines are its own, and what it prints comes before the answer, which begins with ``END`` then. One that is given
``streams`` has these, and the terminal; all further lines are numbers of signals that it is sent. ``noted`` are the
temporary files of who waits (stale_files.py), in which a command may write after others have removed them.

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
from io import BufferedReader
from queue import Queue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from llamadiff.system import stale_files
from llamadiff.system.python_child import adopt_orphans, asked, await_end, die_with_parent
from llamadiff.system.started import APART
from llamadiff.system.stops import SIGNALS

if TYPE_CHECKING:
    import psutil

OFTEN, SELDOM = 0.02, 1.0  # seconds between two looks: at its own child; at all processes, in the end
PATIENCE = 5.0  # seconds that processes may take to die
END = b"\0"
CHUNK = 1 << 16  # bytes

Command = subprocess.Popen[bytes]


def main() -> None:
    """Run one command."""
    adopt_orphans()
    line = b""
    while byte := os.read(0, 1):  # no more of it: what follows is the command's
        line += byte
        if byte == b"\n":
            request = json.loads(line)
            answer = json.dumps(_run(**request)).encode() + b"\n"
            with suppress(BrokenPipeError):  # nobody waits
                sys.stdout.buffer.write(END + answer if request.get("talks") else answer)
                sys.stdout.buffer.flush()
            os._exit(0)  # nor tries again to write what nobody reads


def _run(
    arguments: list[str], talks: bool = False, streams: list[int] | None = None,
    environment: dict[str, str] | None = None, noted: tuple[str, list[str]] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The command's return code, or why it cannot be run."""
    is_alone, is_done, parent = Event(), Event(), os.getppid()
    before = die_with_parent if sys.platform == "linux" else None
    try:
        command = subprocess.Popen(  # noqa: S603
            arguments, preexec_fn=before, env={**os.environ, **(environment or {})},  # noqa: PLW1509 - one thread yet
            **_ways(talks, streams),
        )  # fmt: skip
    except (OSError, ValueError) as error:
        return {"error": getattr(error, "strerror", None) or str(error)}

    def leave() -> None:
        is_alone.set()
        is_done.wait(2 * PATIENCE)

    lines = asked(leave)
    hearing = Thread(target=_hear, args=(command,), daemon=True)
    if streams is not None:
        Thread(target=_signal, args=(command, lines), daemon=True).start()
    if talks:
        Thread(target=_tell, args=(command, lines), daemon=True).start()
        hearing.start()
    family, due, pause = Family(), 0.0, OFTEN
    while command.poll() is None and not is_alone.wait(OFTEN):
        now = time.monotonic()
        if now >= due:
            family.look()
            due, pause = now + pause, min(1.5 * pause, SELDOM)
    family.end()
    command.wait()
    if talks:
        hearing.join(PATIENCE)  # its last words
    if is_alone.is_set():
        await_end(parent)
        stale_files.sweep()
        if noted and os.getppid() != parent:  # it is dead: others may have swept while the command still wrote
            stale_files.remove_again(*noted)
    is_done.set()
    return {"code": command.returncode}


def _ways(talks: bool, streams: list[int] | None) -> dict[str, Any]:
    """What a command is started with: its streams; one that has the user's is in the user's terminal, too."""
    if streams is None:
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
        return {**(pipes if talks else {"stdin": subprocess.DEVNULL, "stdout": 2}), **APART}
    for number in SIGNALS:  # the terminal's are the command's
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    return dict(zip(("stdin", "stdout", "stderr"), streams, strict=True))


def _signal(command: Command, lines: Queue[str]) -> None:
    """Send the command signals."""
    while True:
        number = int(lines.get())
        with suppress(OSError):
            command.send_signal(number)


def _tell(command: Command, lines: Queue[str]) -> None:
    """Pass lines on to the command. What it does not read is let go of here, or Python would tell of it later."""
    assert command.stdin is not None
    with suppress(OSError, ValueError), command.stdin:  # it has ended, or does not listen
        while True:
            command.stdin.write(lines.get().encode() + b"\n")
            if lines.empty():
                command.stdin.flush()


def _hear(command: Command) -> None:
    """Pass on what the command prints, until it has no more to say."""
    assert isinstance(command.stdout, BufferedReader)
    part = b"\n"
    with suppress(OSError):  # nobody reads
        while said := command.stdout.read1(CHUNK):
            part = said
            sys.stdout.buffer.write(part)
            sys.stdout.buffer.flush()
        if not part.endswith(b"\n"):
            sys.stdout.buffer.write(b"\n")


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
        return bool(process.is_running() and process.status() != "zombie")
    return False
