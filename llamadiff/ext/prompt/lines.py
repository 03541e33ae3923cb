"""A command that stays open: a JSON line in, a JSON line out, as tokenizers and renderers of prompts are asked."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from queue import Empty, Queue
from subprocess import PIPE
from threading import Thread
from typing import Any

from llamadiff.candidates.command import tail_of, words_of
from llamadiff.llamacpp.capture import scratch_directory
from llamadiff.system.errors import UserError
from llamadiff.system.python_child import how_it_ended
from llamadiff.system.supervised import Supervised, supervise
from llamadiff.trace.stated import parse_json, reason

PATIENCE = 60.0  # seconds that one answer may take
MAX_LINE = 1 << 22  # bytes of an answer
IN_FOLDERS = ("tokenizer.json", "chat_template.jinja")  # of a checkpoint, that may be given
PIECES = ".model"
AHEAD = 4096  # answers that wait to be read


class Talker:
    """What a command answers. Raises UserError where it says nothing, dies, says too much, or what is no JSON."""

    def __init__(self, name: str, command: Supervised, log: Path, patience: float) -> None:
        self.name, self.log, self.patience = name, log, patience
        self._command = command
        self._asked, self._lines = Queue[bytes](), Queue[bytes](AHEAD)
        for work in (self._ask, self._listen):
            Thread(target=work, daemon=True).start()

    def __call__(self, value: Any) -> Any:
        """The answer to one value."""
        return next(self.all([value]))

    def all(self, values: Iterable[Any]) -> Iterator[Any]:
        """The answers to some, in their order; it is told all of them before."""
        asked = [json.dumps(value) for value in values]
        self._asked.put("".join(f"{line}\n" for line in asked).encode())
        for line in asked:
            yield self._answer(line)

    def _answer(self, asked: str) -> Any:
        try:
            line = self._lines.get(timeout=self.patience)
        except Empty:
            raise self._fault(f"did not answer {_short(asked)} within {self.patience:g} s") from None
        if not line and "error" in self._command.answer():
            function = f"; for a function give {self.name}:FUNCTION" if self.name.endswith(".py") else ""
            raise self._fault(f"{self._end()}{function}")
        if not line:
            raise self._fault(f"{self._end()} before it answered {_short(asked)}{tail_of(self.log)}")
        if len(line) == MAX_LINE and not line.endswith(b"\n"):
            raise self._fault(f"answers {_short(asked)} with more than {MAX_LINE >> 20} MiB on one line")
        try:
            return parse_json(line)
        except ValueError as error:
            said = _short(line.decode("utf-8", "replace").strip())
            raise self._fault(
                f"answers {_short(asked)} with {said}, which is no JSON ({reason(error)}); let it print one JSON value "
                "a line, and nothing else there"
            ) from None

    def _ask(self) -> None:
        """Tell it what it is asked, as fast as it reads that."""
        stream = self._command.supervisor.stdin
        assert stream is not None
        with suppress(OSError, ValueError):  # it is gone, or does not listen: what it says is still to be read
            while True:
                stream.write(self._asked.get())
                stream.flush()

    def _listen(self) -> None:
        stream = self._command.supervisor.stdout
        assert stream is not None
        with suppress(OSError, ValueError):  # it was closed
            while line := stream.readline(MAX_LINE):
                self._lines.put(line)
        self._lines.put(b"")

    def _end(self) -> str:
        answer = self._command.answer()
        if "error" in answer:
            return f"cannot be run ({answer['error']})"
        return how_it_ended(answer["code"]) if "code" in answer else "its supervising process ended"

    def _fault(self, what: str) -> UserError:
        return UserError(f"{self.name}: {what}")


@contextmanager
def talking(spec: str, patience: float = PATIENCE) -> Iterator[Talker]:
    """A command, open until the end of this; its words are cut as those of ``cmd:``. Raises UserError."""
    words = words_of(spec)
    for path in (Path(spec), Path(words[0])):
        _refuse(path)
    with ExitStack() as stack:
        log = Path(stack.enter_context(scratch_directory())) / "log"
        output = stack.enter_context(log.open("wb"))
        command = stack.enter_context(supervise(words, {"stdin": PIPE, "stdout": PIPE, "stderr": output}))
        yield Talker(words[0], command, log, patience)


def _refuse(path: Path) -> None:
    """Raise UserError for a part of a checkpoint that cannot be run, with what to give instead."""
    folder = path if path.is_dir() else path.parent
    weights = f"for a file against its checkpoint: llamadiff weights MODEL.gguf {folder}"
    if path.is_dir():
        found = [str(path / name) for name in IN_FOLDERS if (path / name).is_file()]
        give = f"give {' or '.join(found)}" if found else weights
        raise UserError(f"{path}: is a directory, no command; {give}")
    if path.name.endswith(PIECES) and path.is_file():
        raise UserError(f"{path}: is SentencePiece's model, no command; {weights}")


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
