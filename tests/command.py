"""The command line in this process: what it prints and its exit code, without another Python's start.

What is about the process itself (signals, closed streams, what is left behind) starts one: test_bad_input.py,
test_kills.py, and ``in_process_of_its_own`` here for a few of the others.
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest

from llamadiff.__main__ import main
from llamadiff.system import stale_files
from llamadiff.system.stops import SIGNALS

COMMAND = str(Path(sys.executable).with_name("llamadiff"))
Ended = subprocess.CompletedProcess


def run(*words: object, given: bytes = b"") -> Ended[str]:
    """What ``llamadiff WORDS`` comes to, with ``given`` on standard input."""
    arguments = [os.fsdecode(str(word).encode("utf-8", "surrogateescape")) for word in words]
    streams = {"stdin": _stream(given), "stdout": _stream(), "stderr": _stream()}
    hook, handlers = sys.unraisablehook, {number: signal.getsignal(number) for number in SIGNALS}
    try:
        with (
            mock.patch.multiple(sys, argv=[COMMAND, *arguments], **streams),
            mock.patch.dict(stale_files._OWN, clear=True),  # at its end it removes what it made, and no fixture's
            pytest.raises(SystemExit) as end,
        ):
            main()
    finally:
        sys.unraisablehook = hook
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return Ended(arguments, end.value.code, _text(streams["stdout"]), _text(streams["stderr"]))


def in_process_of_its_own(*words: object, given: bytes = b"", **options: object) -> Ended[str]:
    """The same by the installed command."""
    done = subprocess.run([COMMAND, *map(str, words)], input=given, capture_output=True, check=False, **options)
    return Ended(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def processes_of(place: Path, command: str = "") -> list[str]:
    """Processes that have ``place`` as their TMPDIR."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and str(place).encode() + b"\0" in (process / "environ").read_bytes():
                line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if command in line:
                    found.append(f"{process.name} {line}")
        except OSError:
            pass
    return found


def kill_all_of(place: Path) -> None:
    """What a test that failed has left running there."""
    for line in processes_of(place):
        with suppress(ProcessLookupError):
            os.kill(int(line.split()[0]), signal.SIGKILL)


def _stream(data: bytes = b"") -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(data), "utf-8")


def _text(stream: io.TextIOWrapper) -> str:
    stream.flush()
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue().decode()
