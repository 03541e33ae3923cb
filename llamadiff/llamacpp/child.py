"""Starts llama.cpp's process, sends it a request, follows its progress, and says what it died of.

Little is imported here, so that a command can start the process before it imports the rest.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from subprocess import PIPE
from threading import Lock, Timer
from typing import IO, Any

from llamadiff.llamacpp.request import TOKENIZING, Request
from llamadiff.system import python_child as process
from llamadiff.system.errors import DiedError, NoRoomError, UnrunnableError, UserError
from llamadiff.system.leftovers import sweep
from llamadiff.system.progress import Progress
from llamadiff.system.started import Process, kill, start

MAX_LOG = 1 << 24  # bytes
MOST = 8  # characters that are named

Hear = Callable[[dict[str, Any]], None]


_BEGUN = list[tuple[Process, IO[bytes]]]()


def begin() -> None:
    """Start the process of the next Child, of llama-cpp-python, before there is one."""
    _BEGUN.append(_started())


def _begun() -> tuple[Process, IO[bytes]] | None:
    """The process that was started for this, if it still runs."""
    while _BEGUN:
        running, log = _BEGUN.pop()
        if running.poll() is None:
            return running, log
        log.close()
    return None


def _started(llama_cpp: str = "") -> tuple[Process, IO[bytes]]:
    """The process, and the file that is its log."""
    log = _nameless_file()
    command = process.command("llamadiff.llamacpp.child_main", *filter(None, [llama_cpp]))
    return start(command, kill, stdin=PIPE, stdout=PIPE, stderr=log, text=True), log


class Child:
    """A process that gets llama.cpp ready as soon as it is made, and serves requests. A context manager.

    ``meanwhile``: what this process does, once, while the first request is served.
    """

    def __init__(self, llama_cpp: str = "", patience: float | None = None) -> None:
        """``llama_cpp``: the directory of a build; llama-cpp-python's, unless it is given.

        ``patience``: the seconds that a request may take; as long as it likes, unless they are given.
        """
        self.patience, self._is_late, self._is_idle = patience, False, True
        self.meanwhile = list[Callable[[], object]]()
        self._voice = Lock()
        self._heard = 0  # bytes of the log that belong to requests before
        self._process, self._log = (None if llama_cpp else _begun()) or _started(llama_cpp)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        """No orphan process and no temporary file, however this ends."""
        child = self._process
        kill(child)
        for stream in (child.stdin, child.stdout, self._log):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        if not self._is_idle:
            sweep()

    def ask(self, request: Request, progress: Progress, hear: Hear | None = None) -> dict[str, Any]:
        """Its answers to a request, merged. Raises UserError for what it says, UnrunnableError where it cannot run.

        ``hear``: is given each answer as it comes.
        """
        with self._in_time():
            answers = self._conversation(request, progress, hear)
        if self._is_late:
            raise DiedError(f"{request.model}: llama.cpp hangs: it did not end within {self.patience:g} s")
        noise = self._said()
        if "error" in answers:
            raise _refusal(answers, noise)
        if "done" not in answers:
            raise death(self._process.returncode, request, answers.get("phase", ""), noise)
        return answers

    def ahead(self, request: Request) -> None:
        """Have the model loaded that a request will ask for: meanwhile this process reads the file itself."""
        self.tell(ahead=request.to_json())

    def tell(self, **words: Any) -> None:
        """Say something while it serves a request; from any thread. A child that died does not hear it."""
        assert self._process.stdin is not None
        with self._voice, suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(json.dumps(words) + "\n")
            self._process.stdin.flush()

    def _said(self) -> str:
        """llama.cpp's log of the last request."""
        self._log.seek(self._heard)
        said = self._log.read(MAX_LOG)
        self._heard = self._log.seek(0, os.SEEK_END)  # where the child goes on: the two share the place
        return said.decode("utf-8", "replace")

    @contextmanager
    def _in_time(self) -> Iterator[None]:
        """End the process when its patience does."""
        if self.patience is None:
            yield
            return
        timer = Timer(self.patience, self._end)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _end(self) -> None:
        self._is_late = True
        self._process.kill()

    def _conversation(self, request: Request, progress: Progress, hear: Hear | None) -> dict[str, Any]:
        """Send the request, then merge the answers up to the last one; where the child dies before, wait for its end.

        Its standard input stays open: that it ends is how the child learns that this process is gone.
        """
        child, answers, self._is_idle = self._process, dict[str, Any](), False
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(json.dumps(request.to_json()) + "\n")
            child.stdin.flush()
            while self.meanwhile:
                self.meanwhile.pop(0)()
            for line in child.stdout:
                answer = json.loads(line)
                if "phase" in answer:
                    progress(answer["phase"])
                if hear is not None:
                    hear(answer)
                answers.update(answer)
                if "done" in answer or "error" in answer:
                    self._is_idle = True
                    return answers
        except (BrokenPipeError, ValueError):
            pass  # it died; its return code says how
        child.wait()
        return answers


def _refusal(answers: dict[str, Any], log: str) -> UserError:
    """The error that it answered with."""
    if "needs" in answers:
        return NoRoomError(answers["error"], answers["needs"])
    return (UnrunnableError if answers.get("unrunnable") else UserError)(_with_log(answers["error"], log))


def _nameless_file() -> IO[bytes]:
    """A file that ends with the processes that have it open: in memory, where the system can."""
    return os.fdopen(os.memfd_create("log"), "w+b") if sys.platform == "linux" else tempfile.TemporaryFile()


def death(code: int, request: Request, phase: str, log: str) -> UserError:
    """What is known of a death: by another's hand, of the prompt's characters, or by a fault of its own."""
    about = f"{request.model}: " if request.model else ""
    if not process.is_fault(code):
        likely = "perhaps by the system, for want of memory; give fewer tokens, or" if code == -9 else "from outside;"
        return UserError(f"{about}llama.cpp's process {process.how_it_ended(code)}, {likely} run it again")
    if phase == TOKENIZING:
        return _death_of_a_prompt(code, request, log)
    return DiedError(about + _with_log(_obituary(code, request), log))


def _death_of_a_prompt(code: int, request: Request, log: str) -> UserError:
    from llamadiff.trace.token_text import of_file

    lacking = of_file(request.model).lacking(request.text or "")
    if lacking:
        more = f" and {len(lacking) - MOST} more" if len(lacking) > MOST else ""
        named = ", ".join(f'"{character}" (U+{ord(character):04X})' for character in lacking[:MOST])
        return UserError(
            f"{request.model}: the vocabulary has no token for {named}{more}, nor tokens for single bytes, and "
            "llama.cpp's tokenizer aborts on such a prompt; leave these out, or give token ids with --tokens 1,2,3"
        )
    words = f"llama.cpp died of {_cause(code)} while it tokenized this prompt"
    return UserError(f"{request.model}: {_with_log(words, log)}; give another prompt, or token ids with --tokens 1,2,3")


def _obituary(code: int, request: Request) -> str:
    advice = "it aborts on files it takes for damaged or unsupported"
    if code != -signal.SIGABRT:
        advice = "that is a fault in llama.cpp"
    if request.settings.repack:
        advice = "its repacked kernels crash on some CPUs; run again without --repack"
    return f"llama.cpp died of {_cause(code)}: {advice}"


def _cause(code: int) -> str:
    return process.signal_name(-code) if code < 0 else f"exit code {code}"


def _with_log(message: str, log: str) -> str:
    """The message and what llama.cpp said that explains it: an assertion, or the first error."""
    lines = [" ".join(line.split()) for line in log.splitlines() if line.strip(" .")]
    asserted = [line for line in lines if "GGML_ASSERT" in line or "GGML_ABORT" in line]
    errors = [line.removeprefix("error: ") for line in lines if "error" in line.lower()]
    chosen = asserted[:1] or errors[:1] or lines[-1:]
    return f"{message} (it said: {_without_folders(chosen[0])[:300]})" if chosen else message


def _without_folders(line: str) -> str:
    """A line of a C assertion with the source file's name alone: the folders are those of the build."""
    return re.sub(r"\S*/([\w.-]+\.(?:cpp|c|h):\d+)", r"\1", line)
