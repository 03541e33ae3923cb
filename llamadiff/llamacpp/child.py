"""Starts llama.cpp's process, sends it a request, follows its progress, and says what it died of.

Little is imported here, so that a command can start the process before it imports the rest.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import secrets
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from subprocess import PIPE
from threading import Lock, Timer
from typing import IO, Any

from llamadiff import plugins
from llamadiff.llamacpp.request import TOKENIZING, Request, Settings
from llamadiff.system import python_child as process
from llamadiff.system.errors import DiedError, NoRoomError, UnrunnableError, UserError
from llamadiff.system.progress import Progress
from llamadiff.system.stale_files import sweep
from llamadiff.system.started import Process, kill, start

MAX_LOG = 1 << 24  # bytes
MOST = 8  # characters that are named
_ALL_WELL = re.compile(r"\bloaded \S+ backend\b|^ggml_\w+(_init: found |: No devices found)")  # explains no error

Hear = Callable[[dict[str, Any], Sequence[Any]], None]  # is given each answer, and the bytes that came with it


@dataclass(frozen=True)
class _Running:
    """The process, the file that is its log, and the one in which it may put bytes."""

    process: Process
    log: IO[bytes]
    shared: IO[bytes]

    def close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout, self.log, self.shared):
            if stream is not None:
                with suppress(OSError):
                    stream.close()


_BEGUN = list[_Running]()


def begin() -> None:
    """Start the process of the next Child, of llama-cpp-python, before there is one."""
    _BEGUN.append(_start_process())


def _take_started() -> _Running | None:
    """The process that was started for this, if it still runs."""
    while _BEGUN:
        running = _BEGUN.pop()
        if running.process.poll() is None:
            return running
        running.close()
    return None


def _start_process(llama_cpp: str = "", runner: str = "") -> _Running:
    """llama.cpp's process, here or where a ``runner`` starts it. Raises UserError for a runner that is not there."""
    log, shared, word = process.nameless_file(), process.nameless_file(), secrets.token_hex(8)
    shared.write(word.encode())
    shared.flush()
    words = (llama_cpp, str(shared.fileno()), word, _opener(llama_cpp))
    streams = {"stderr": log, **process.inherits(shared)}
    if runner:
        start_there = plugins.ask_first(lambda each: each.runner())
        if start_there is None:
            raise UserError(f"runner={runner}: the slice that starts one is missing")
        return _Running(start_there(runner, *words, **streams), log, shared)
    command = process.command("llamadiff.llamacpp.child_main", *words)
    return _Running(start(command, kill, stdin=PIPE, stdout=PIPE, **streams), log, shared)


def _opener(llama_cpp: str) -> str:
    """What loads a build of llama.cpp in that process. Raises UserError where one is asked for, and no slice does."""
    opener = plugins.ask_first(lambda each: each.library) or ""
    if llama_cpp and not opener:
        raise UserError("--llama-cpp DIR: the slice that loads a build is missing; leave it out, or mend llamadiff")
    return opener


class Child:
    """A process that gets llama.cpp ready as soon as it is made, and serves requests. A context manager.

    ``meanwhile``: what this process does, once, while the first request is served.
    """

    def __init__(self, settings: Settings | None = None, patience: float | None = None) -> None:
        """``settings``: they say which llama.cpp is run, and where.

        ``patience``: the seconds that a request may take; as long as it likes, unless they are given.
        """
        where = Settings() if settings is None else settings
        self.runner, self.llama_cpp = where.runner, where.llama_cpp
        self._is_opened = False  # whether the library could be loaded
        self.patience, self._is_late, self._is_idle = patience, False, True
        self.meanwhile = list[Callable[[], object]]()
        self._voice = Lock()
        self._heard = 0  # bytes of the log that belong to requests before
        plain = not (where.llama_cpp or where.runner)
        self._running = (_take_started() if plain else None) or _start_process(where.llama_cpp, where.runner)
        self._process, self._log = self._running.process, self._running.log
        self._map: mmap.mmap | None = None

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        """No orphan process and no temporary file, however this ends."""
        kill(self._process)
        self._running.close()
        if self._map is not None:
            with suppress(BufferError):  # somebody still looks into it
                self._map.close()
        if not self._is_idle:
            sweep()

    def ask(self, request: Request, progress: Progress, hear: Hear | None = None) -> dict[str, Any]:
        """Its answers to a request, merged. Raises UserError for what it says, UnrunnableError where it cannot run.

        ``hear``: is given each answer as it comes, and its bytes; what it raises ends the process.
        """
        with self._in_time():
            answers = self._conversation(request, progress, hear)
        if self._is_late:
            raise DiedError(f"{request.model}: llama.cpp hangs: it did not end within {self.patience:g} s")
        noise = self._read_log()
        if "error" in answers:
            raise _refusal(answers, noise)
        if "done" not in answers:
            if not (self._is_opened or self.runner) and process.is_fault(self._process.returncode):
                raise _unloadable(self._process.returncode, self.llama_cpp, noise)
            raise death(self._process.returncode, request, answers.get("phase", ""), noise, self.runner)
        return answers

    def stop(self) -> None:
        """Let it end, whatever it does, for whoever asks it something to see; from any thread."""
        self._process.kill()

    def ahead(self, request: Request) -> None:
        """Have the model loaded that a request will ask for: meanwhile this process reads the file itself."""
        self.tell(ahead=_sent(request))

    def tell(self, **words: Any) -> None:
        """Say something while it serves a request; from any thread. A child that died does not hear it."""
        assert self._process.stdin is not None
        with self._voice, suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(json.dumps(words).encode() + b"\n")
            self._process.stdin.flush()

    def _read_log(self) -> str:
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
        self.stop()

    def _conversation(self, request: Request, progress: Progress, hear: Hear | None) -> dict[str, Any]:
        """Send the request, then merge the answers up to the last one; where the child dies before, wait for its end.

        Its standard input stays open: that it ends is how the child learns that this process is gone.
        """
        child, answers, self._is_idle = self._process, dict[str, Any](), False
        assert child.stdout is not None
        try:
            self.tell(**_sent(request))  # where it died, its last words are still to be read
            while self.meanwhile:
                self.meanwhile.pop(0)()
            while line := child.stdout.readline():
                answer = self._answer(line)
                if "opened" in answer:
                    self._is_opened = True
                    continue
                blobs = answer.pop("blobs", ())
                if "phase" in answer:
                    progress(answer["phase"])
                if hear is not None:
                    self._hand_over(hear, answer, blobs)
                if not blobs:
                    answers.update(answer)
                if "done" in answer or "error" in answer:
                    self._is_idle = True
                    return answers
        except EOFError:
            pass  # it died; its return code says how
        child.wait()
        return answers

    def _answer(self, line: bytes) -> dict[str, Any]:
        """What a line says. Raises EOFError where the process died in it, UserError for what is no answer."""
        try:
            answer = json.loads(line)
            if isinstance(answer, dict):
                return answer
        except ValueError:
            if not line.endswith(b"\n"):
                raise EOFError from None
        kill(self._process)
        said = line.decode("utf-8", "replace").strip()[:100]
        by = f"runner={self.runner}" if self.runner else "llama.cpp's process"
        raise UnrunnableError(f"{by}: prints {said!r} where answers are expected; let nothing else write there")

    def _hand_over(self, hear: Hear, answer: dict[str, Any], blobs: Sequence[Sequence[int]]) -> None:
        """Hand an answer over, and let its bytes go."""
        try:
            hear(answer, [self._bytes(*blob) for blob in blobs])
        except BaseException:
            kill(self._process)
            raise
        if blobs:
            self.tell(read=[place for place, _, _ in blobs])

    def _bytes(self, place: int, size: int, is_shared: int) -> memoryview:
        """Bytes in the memory that both share, or behind the words that told of them."""
        if not is_shared:
            assert self._process.stdout is not None
            found = self._process.stdout.read(size)
            if len(found) < size:
                raise EOFError
            return memoryview(found)
        if self._map is None or len(self._map) < place + size:
            self._map = mmap.mmap(self._running.shared.fileno(), 0, access=mmap.ACCESS_READ)
        return memoryview(self._map)[place : place + size]


def _sent(request: Request) -> dict[str, Any]:
    """A request, with what a slice does for it there."""
    return replace(request, placing=plugins.ask_first(lambda each: each.placing) or "").to_json()


def _refusal(answers: dict[str, Any], log: str) -> UserError:
    """The error that it answered with."""
    if "needs" in answers:
        return NoRoomError(answers["error"], answers["needs"])
    return (UnrunnableError if answers.get("unrunnable") else UserError)(_with_log(answers["error"], log))


def death(code: int, request: Request, phase: str, log: str, runner: str = "") -> UserError:
    """What is known of a death: by another's hand, of the prompt's characters, or by a fault of its own."""
    refused = signal.SIGILL in (-code, code - 128) or "Illegal instruction" in log
    if runner and (refused or not phase):
        return _unrun(refused, runner, log)
    about = f"{request.model}: " if request.model else ""
    if not process.is_fault(code):
        likely = "perhaps by the system, for want of memory; give fewer tokens, or" if code == -9 else "from outside;"
        return UserError(f"{about}llama.cpp's process {process.how_it_ended(code)}, {likely} run it again")
    if phase == TOKENIZING:
        return _death_of_a_prompt(code, request, log)
    return DiedError(about + _with_log(_obituary(code, request), log))


def _unloadable(code: int, llama_cpp: str, log: str) -> UserError:
    """A library that its process died of before any model was asked for: none is to blame."""
    from llamadiff.llamacpp.library import INSTALL

    whose, again = "llama.cpp", f"pip install --force-reinstall --no-cache-dir {INSTALL}"
    if llama_cpp:
        whose, again = f"--llama-cpp {llama_cpp}", "build or unpack it again"
    words = f"{whose}: cannot be loaded: the process that opened it {process.how_it_ended(code)}"
    return DiedError(f"{_with_log(words, log)}; it is damaged, or made for another CPU: {again}")


def _unrun(refused: bool, runner: str, log: str) -> UserError:
    """A runner that ended before llama.cpp was ready, or an emulator that ``refused`` an instruction."""
    said = last_words(log)
    if refused:
        return UnrunnableError(
            f"runner={runner}: the CPU there refuses an instruction of this Python or llama.cpp{said}; give another "
            "CPU to the emulator (-cpu max), or a build for this one"
        )
    return UnrunnableError(
        f"runner={runner}: no Python answers{said}; give the words that start one of 3.10 or later, as in "
        "'docker exec -i box python3'"
    )


def _death_of_a_prompt(code: int, request: Request, log: str) -> UserError:
    from llamaref import Weights

    from llamadiff.trace.token_text import Vocabulary

    lacking = Vocabulary(Weights(request.model).fields).missing_from(request.text or "")
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
    if code != -signal.SIGABRT or request.way.steps:  # the file has been run before
        advice = "that is a fault in llama.cpp"
    if request.settings.repack:
        advice = "its repacked kernels crash on some CPUs; run again without repack=on"
    return f"llama.cpp died of {_cause(code)}: {advice}"


def _cause(code: int) -> str:
    return process.signal_name(-code) if code < 0 else f"exit code {code}"


def _with_log(message: str, log: str) -> str:
    """The message and what llama.cpp said that explains it: an assertion, or the first error."""
    lines = [" ".join(line.split()) for line in log.splitlines() if line.strip(" .") and not _ALL_WELL.search(line)]
    asserted = [line for line in lines if "GGML_ASSERT" in line or "GGML_ABORT" in line]
    errors = [line.removeprefix("error: ") for line in lines if "error" in line.lower()]
    chosen = asserted[:1] or errors[:1] or lines[-1:]
    return f"{message} (it said: {_without_folders(chosen[0])[:300]})" if chosen else message


def _without_folders(line: str) -> str:
    """A line of a C assertion with the source file's name alone: the folders are those of the build."""
    return re.sub(r"\S*/([\w.-]+\.(?:cpp|c|h):\d+)", r"\1", line)


def last_words(log: str) -> str:
    """What a runner, or what it runs, said last, for the end of a message; empty if it said nothing."""
    lines = [" ".join(line.split()) for line in log.splitlines() if line.strip()]
    return f" (it said: {lines[-1][:300]})" if lines else ""
