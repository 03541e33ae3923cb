"""A watched program where nothing of llamadiff is installed: runs it, and sends what it writes down.

It is started as llama.cpp's process is (remote_bootstrap.py). The first line on standard input says what to run, others
how many bytes were judged, and which signals the program is sent; it stays open as long as somebody wants the program.
Answers are JSON lines on standard output, each with as many bytes behind it as it says. The program's standard input is
empty.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from queue import Queue
from threading import Lock, Thread
from typing import Any, BinaryIO

from llamadiff.ext.watch import watched_ggml
from llamadiff.ext.watch.watch_run import COUNTS, GRAPH, OFTEN, WEIGHT, Answers, Bounds, Plan, files, planned, variables
from llamadiff.ext.watch.watched_ggml import Ggml
from llamadiff.system.errors import UserError
from llamadiff.system.exits import reason
from llamadiff.system.python_child import end_session, how_it_ended, leave_no_core, said_in_a_fork, watch_parent
from llamadiff.system.stale_files import remove_own, sweep, temporary_directory
from llamadiff.system.stops import SIGNALS

CHUNK = 1 << 16


class Voice:
    """Standard output: a JSON line, and bytes behind it; of several threads one at a time."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._lock = stream, Lock()

    def say(self, data: bytes = b"", **answer: Any) -> None:
        with self._lock, suppress(BrokenPipeError):
            self._stream.write(json.dumps({**answer, "size": len(data)}).encode() + b"\n" + data)
            self._stream.flush()

    def send(self, path: Path) -> None:
        """A file, which is removed."""
        with self._lock, suppress(BrokenPipeError), path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            self._stream.write(json.dumps({"file": path.name, "size": size}).encode() + b"\n")
            shutil.copyfileobj(file, self._stream)
            self._stream.flush()
        path.unlink()


def main() -> None:
    """Run one program."""
    leave_no_core()
    for number in SIGNALS:  # the terminal's are passed on, by who hears them first
        signal.signal(number, lambda *_: None)
    voice = Voice(os.fdopen(os.dup(1), "wb"))
    os.dup2(2, 1)
    program = list[subprocess.Popen[bytes]]()

    def leave() -> None:
        for each in program:
            end_session(each.pid)
        remove_own()
        sweep()

    heard = watch_parent(leave)
    request = json.loads(heard.get())
    try:
        with temporary_directory() as folder, planned(folder, Bounds(**request["bounds"])) as plan:
            _run(request["arguments"], folder, plan, voice, heard, program)
    except Exception as error:  # whoever reads this is told, whatever it was
        voice.say(error=reason(error, "what runs the program there"))
    sweep()


def _run(
    arguments: list[str], folder: Path, plan: Plan, voice: Voice, heard: Queue[str],
    program: list[subprocess.Popen[bytes]],
) -> None:  # fmt: skip
    environment, started, pipe = {**os.environ, **variables(folder)}, time.monotonic(), subprocess.PIPE
    try:
        process = subprocess.Popen(  # noqa: S603
            arguments, env=environment, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True
        )
    except OSError as error:
        raise UserError(f"{arguments[0]}: cannot be run ({error.strerror})") from None
    program.append(process)
    passing = [Thread(target=_pass_on, args=(voice, *each)) for each in ((1, process.stdout), (2, process.stderr))]
    for thread in passing:
        thread.start()
    answers = Answers(folder, _asked)
    try:
        while process.poll() is None:
            while not heard.empty():
                _heed(json.loads(heard.get()), plan, process)
            for key in answers.give():
                voice.say(ggml=asdict(answers.ggmls[key]), key=key)
            _send(folder, voice)
            time.sleep(OFTEN)
        seconds = time.monotonic() - started
        _send(folder, voice)
    finally:
        end_session(process.pid)  # and what it has left, which holds its streams
    for thread in passing:
        thread.join()
    counts = {name: getattr(plan, name) for name in COUNTS}
    voice.say(ended=process.returncode, seconds=seconds, counts=counts, order=sys.byteorder)


def _send(folder: Path, voice: Voice) -> None:
    """What is written down: a graph after all weights that it reads."""
    graphs = files(folder, GRAPH)
    for name, _ in (*files(folder, WEIGHT), *graphs):
        voice.send(folder / name)


def _heed(said: dict[str, int], plan: Plan, process: subprocess.Popen[bytes]) -> None:
    plan.judged = said.get("judged", plan.judged)
    if "signal" in said:
        process.send_signal(said["signal"])


def _pass_on(voice: Voice, number: int, stream: Any) -> None:
    """What the program prints, as it comes."""
    while part := stream.read1(CHUNK):
        voice.say(part, stream=number)


def _asked(base: str, cpu: str) -> Ggml:
    """What a library says of itself, in a process of its own: it stays loaded, and may end what loads it."""
    said, code = said_in_a_fork(lambda: watched_ggml.main(base, cpu), watched_ggml.PATIENCE)
    if not said:
        return Ggml(base, refused=how_it_ended(code))
    return Ggml(base, **json.loads(said.splitlines()[-1]))
