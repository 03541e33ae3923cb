"""``cmd: ./engine --model {model} --tokens {tokens} --dump {out}``: the engine is run; its dump is the candidate.

An engine that generates on its own is given ``{prompt}``, the prompt's ids, and ``{n_predict}``, how many to add; one
that is to run ids step by step ``{tokens}``, all of them, and ``{n_prefill}``, how many to run first.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from llamadiff.candidates import TRACES
from llamadiff.candidates.source import CandidateSource, Context
from llamadiff.llamacpp.capture import scratch_directory
from llamadiff.system.commands import split_line
from llamadiff.system.errors import UserError
from llamadiff.system.python_child import how_it_ended
from llamadiff.system.supervised import Supervised, supervise
from llamadiff.trace.reader import Trace

PREFIX = "cmd:"
TAIL = 2000  # bytes of the command's output that are shown when it fails
MAX_OUTPUT = 64 << 20
REPORTS = (".json", ".csv", ".xml", ".md", ".markdown", ".html")


def matches(spec: str) -> bool:
    """Whether it is a command."""
    return spec.startswith(PREFIX)


def files(spec: str) -> Iterator[Path]:
    """What its words name: files, and those that lie in directories, but for what reports are usually called."""
    for word in words_of(spec):
        for path in (Path(word), Path(word.partition("=")[2])):
            if path.name and path.is_file():
                yield path
            elif path.name and path.is_dir():
                yield from (file for file in path.iterdir() if file.is_file() and file.suffix not in REPORTS)


def open_source(spec: str) -> CandidateSource:
    """The command, which is run once the tokens are known; no shell is involved."""
    words_of(spec)
    return CandidateSource(partial(_load_trace, spec))


def _load_trace(spec: str, context: Context) -> Trace:
    from llamadiff.candidates.opening import resolve

    with scratch_directory() as place:
        out = Path(place) / "out"
        carry_out(spec, context, out)
        where = "{out}" if "{out}" in spec else "{out}; the command has no {out}, the place to write to"
        trace = resolve(str(find_output(out, f"--candidate {spec}", where)), context)
        return trace.in_memory()


def carry_out(spec: str, context: Context, out: Path, steps: str = "") -> None:
    """Run the command; what it writes goes to ``out``. Raises UserError if it cannot be run, fails, or hangs."""
    arguments = _arguments(spec, context, out, steps)
    context.progress(f"running {arguments[0]}")
    _run_command(arguments, out.with_name("log"), context.timeout)


def words_of(spec: str, prefix: str = PREFIX) -> list[str]:
    """The words of a command behind a prefix. Raises UserError if there are none."""
    try:
        words = split_line(spec.removeprefix(prefix))
    except ValueError as error:
        raise UserError(f"--candidate {spec}: {error}") from None
    if not words:
        raise UserError(f"--candidate {spec}: no command; expected {prefix} ./engine and its arguments")
    return words


def _arguments(spec: str, context: Context, out: Path, steps: str) -> list[str]:
    n, ids = context.n_prefill, [str(token) for token in context.tokens]
    values = {"model": str(context.model.path.resolve()), "tokens": ",".join(ids), "prompt": ",".join(ids[:n]),
              "n_prefill": str(n), "n_predict": str(len(ids) - n), "out": str(out), "steps": steps,
              "rows": f"0-{len(ids) - 1}", "tokens_file": str(out.with_name("tokens"))}  # fmt: skip
    out.with_name("tokens").write_text(values["tokens"], encoding="utf-8")  # a word may not be so long
    words = words_of(spec)
    for name, value in values.items():
        words = [word.replace("{" + name + "}", value) for word in words]
    return words


def _run_command(arguments: list[str], log: Path, timeout: float) -> None:
    """Raises UserError, with the end of what it printed, if the command fails, hangs or prints without end."""
    with log.open("wb") as output:
        streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        with supervise(arguments, streams) as command:
            reason = _watch(command, log, timeout) or _failure(arguments, command)
    if reason is not None:
        raise UserError(f"{arguments[0]}: {reason}{tail_of(log)}")


def _failure(arguments: list[str], command: Supervised) -> str | None:
    """How a command that has ended failed, if it did."""
    answer = command.answer()
    if "error" in answer:
        raise UserError(f"{arguments[0]}: cannot be run ({answer['error']})")
    if "code" not in answer:
        return f"its supervising process {how_it_ended(command.supervisor.returncode)}"
    return how_it_ended(answer["code"]) if answer["code"] else None


def _watch(command: Supervised, log: Path, timeout: float) -> str | None:
    """Wait for the end; says why it was not waited for longer."""
    until = time.monotonic() + timeout
    while command.runs:
        if time.monotonic() >= until:
            return f"still running after {timeout:g} s (--timeout)"
        if log.stat().st_size > MAX_OUTPUT:
            return f"printed more than {MAX_OUTPUT >> 20} MiB"
        command.wait(0.2)
    return None


def tail_of(log: Path) -> str:
    """The end of what a command printed, as a message goes on with it."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL))
        lines = file.read().decode("utf-8", "replace").splitlines()
    text = " ".join(line.strip() for line in lines if line.strip(" ^~"))
    return f"; its last words: {text}" if text else "; it printed nothing"


def find_output(out: Path, whose: str, where: str) -> Path:
    """What a command wrote to a place, with the ending of a trace or without. Raises UserError if that is nothing."""
    for path in (out, *(out.with_name(f"{out.name}{ending}") for ending in TRACES)):
        if path.exists():
            return path
    raise UserError(f"{whose}: the command wrote nothing to {where}")
