"""llama.cpp's process, from outside: start it, ask it, follow it, and put its end into words.

Little is imported here, so that a command can start the process before it imports the rest.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from llamadiff import child as process
from llamadiff.errors import UnrunnableError, UserError
from llamadiff.llamacpp.request import Request
from llamadiff.output import temporary_name
from llamadiff.phase import Progress


class Child:
    """A process that gets llama.cpp ready as soon as it is made, and serves one request. A context manager."""

    def __init__(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
        command = process.command("llamadiff.llamacpp.serve")
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._log, text=True)
        self._output: Path | None = None

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        """No orphan process and no temporary file, however this ends."""
        child = self._process
        if child.poll() is None:
            child.kill()
            child.wait()
        for stream in (child.stdin, child.stdout, self._log):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        if self._output is not None:
            with suppress(OSError):
                temporary_name(self._output, child.pid).unlink()

    def ask(self, request: Request, progress: Progress) -> dict[str, Any]:
        """Its answers to a request, merged. Raises UserError for what it says, UnrunnableError where it cannot run."""
        self._output = Path(request.output) if request.output is not None else None
        answers = self._conversation(request, progress)
        self._log.seek(0)
        noise = self._log.read().decode("utf-8", "replace")
        if "error" in answers:
            kind = UnrunnableError if answers.get("unrunnable") else UserError
            raise kind(_with_log(answers["error"], noise))
        if "done" not in answers:
            about = f"{request.model}: " if request.model else ""
            raise UnrunnableError(about + _with_log(_obituary(self._process.returncode, request), noise))
        return answers

    def _conversation(self, request: Request, progress: Progress) -> dict[str, Any]:
        """Send the request, then merge the answers until the child closes its side.

        Its standard input stays open: that it ends is how the child learns that this process is gone.
        """
        child, answers = self._process, dict[str, Any]()
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(json.dumps(request.to_json()) + "\n")
            child.stdin.flush()
            for line in child.stdout:
                answer = json.loads(line)
                if "phase" in answer:
                    progress(answer["phase"])
                answers.update(answer)
        except (BrokenPipeError, ValueError):
            pass  # it died; its return code says how
        child.wait()
        return answers


def _obituary(code: int, request: Request) -> str:
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    advice = {
        "SIGABRT": "it aborts on files it takes for damaged or unsupported",
        "SIGKILL": "it was killed, perhaps for want of memory",
    }.get(name, "that is a fault in llama.cpp")
    if request.settings.repack and name != "SIGKILL":
        advice = "its repacked kernels crash on some CPUs; run again without --repack"
    return f"llama.cpp died of {name}: {advice}"


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
