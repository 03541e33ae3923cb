"""``cmd: ./engine --model {model} --tokens {tokens} --dump {out}``: the engine is run; its dump is the candidate.

An engine that generates on its own is given ``{prompt}``, the prompt's ids, and ``{n_predict}``, how many to add; one
that is to run ids step by step ``{tokens}``, all of them, and ``{n_prefill}``, how many to run first.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from llamadiff.candidates.source import Context, Opened, register
from llamadiff.errors import UserError
from llamadiff.trace import Trace

PREFIX = "cmd:"
TAIL = 2000  # bytes of the command's output that are shown when it fails
MAX_OUTPUT = 64 << 20
REPORTS = (".json", ".csv")


@register
class Command:
    """Runs an engine with a time limit; no shell is involved."""

    def matches(self, spec: str) -> bool:
        return spec.startswith(PREFIX)

    def files(self, spec: str) -> Iterator[Path]:
        """What its words name: files, and those that lie in directories, but for what reports are usually called."""
        for word in _words(spec):
            for path in (Path(word), Path(word.partition("=")[2])):
                if path.name and path.is_file():
                    yield path
                elif path.name and path.is_dir():
                    yield from (file for file in path.iterdir() if file.is_file() and file.suffix not in REPORTS)

    def open(self, spec: str) -> Opened:
        _words(spec)
        return Opened(partial(_loaded, spec))


def _loaded(spec: str, context: Context) -> Trace:
    from llamadiff.candidates import resolve

    folder = Path(tempfile.mkdtemp(prefix="llamadiff-"))
    try:
        out = folder / "out"
        arguments = _arguments(spec, context, out)
        context.progress(f"running {arguments[0]}")
        _run(arguments, folder / "log", context.timeout)
        trace = resolve(str(_written(out, spec)), context)
        return trace.in_memory()
    finally:
        _remove(folder)


def _words(spec: str) -> list[str]:
    """The words of a command. Raises UserError if there are none."""
    try:
        words = shlex.split(spec.removeprefix(PREFIX))
    except ValueError as error:
        raise UserError(f"--candidate {spec}: {error}") from None
    if not words:
        raise UserError(f"--candidate {spec}: no command; expected cmd: ./engine --tokens {{tokens}} --dump {{out}}")
    return words


def _arguments(spec: str, context: Context, out: Path) -> list[str]:
    n, ids = context.n_prefill, [str(token) for token in context.tokens]
    values = {"model": str(context.model.path.resolve()), "tokens": ",".join(ids), "prompt": ",".join(ids[:n]),
              "n_prefill": str(n), "n_predict": str(len(ids) - n), "out": str(out)}  # fmt: skip
    words = _words(spec)
    for name, value in values.items():
        words = [word.replace("{" + name + "}", value) for word in words]
    return words


def _run(arguments: list[str], log: Path, timeout: float) -> None:
    """Raises UserError, with the end of what it printed, if the command fails, hangs or prints without end."""
    with log.open("wb") as output:
        try:
            child = subprocess.Popen(  # noqa: S603
                arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            raise UserError(f"{arguments[0]}: cannot be run ({error.strerror})") from None
        try:
            reason = _watch(child, log, timeout)
        finally:
            _end(child)
    if reason is None and child.returncode != 0:
        code = child.returncode
        reason = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    if reason is not None:
        raise UserError(f"{arguments[0]}: {reason}{_tail(log)}")


def _watch(child: subprocess.Popen[bytes], log: Path, timeout: float) -> str | None:
    """Wait for the end; says why it was not waited for longer."""
    waited = 0.0
    while True:
        try:
            child.wait(0.2)
        except subprocess.TimeoutExpired:
            waited += 0.2
        else:
            return None
        if waited >= timeout:
            return f"still running after {timeout:g} s (--timeout)"
        if log.stat().st_size > MAX_OUTPUT:
            return f"printed more than {MAX_OUTPUT >> 20} MiB"


def _end(child: subprocess.Popen[bytes]) -> None:
    """No process of the command's session survives."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _tail(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL))
        text = file.read().decode("utf-8", "replace").strip()
    return f"; its last words: {text}" if text else "; it printed nothing"


def _written(out: Path, spec: str) -> Path:
    for path in (out, out.with_suffix(".safetensors"), out.with_suffix(".npz")):
        if path.exists():
            return path
    hint = "" if "{out}" in spec else "; the command has no {out}, the place to write to"
    raise UserError(f"--candidate {spec}: the command wrote nothing to {{out}}{hint}")


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
