"""``record: ./engine -m model.bin -i "Once"``: a program that was not changed; its values are found in its memory."""

from __future__ import annotations

import platform
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from llamadiff.candidates.command import tail_of
from llamadiff.candidates.source import CandidateSource, Context
from llamadiff.ext.record.align import Rows, align
from llamadiff.ext.record.log import Log
from llamadiff.ext.record.search import Memory, Search
from llamadiff.llamacpp.capture import scratch_directory
from llamadiff.system import python_child
from llamadiff.system.commands import split_line
from llamadiff.system.errors import UserError
from llamadiff.system.python_child import how_it_ended
from llamadiff.system.supervised import supervise
from llamadiff.trace.metadata import Info
from llamadiff.trace.reader import Printed, Trace

PREFIX = "record:"
NOWHERE = "nowhere"  # the key of a producer: the first values that were not in its memory
FEW = 3  # taps that are named
MOST = 1 << 30  # bytes of a program's writes that are kept
DTYPES = {"f16": "f16", "bf16": "bf16"}  # of which a trace says that values had so many bits


def matches(spec: str) -> bool:
    """Whether it is a program to be recorded."""
    return spec.startswith(PREFIX)


def files(spec: str) -> Iterator[Path]:
    """The files that its words name."""
    return (path for word in _words(spec) if (path := Path(word)).name and path.is_file())


def open_source(spec: str) -> CandidateSource:
    """The program, which is run once the tokens are known. Raises UserError where it cannot be recorded."""
    words = _words(spec)
    if platform.system() != "Linux":
        raise UserError(f"{PREFIX} needs Linux; docs/writing-a-trace.md says how an engine writes what it computes")
    missing = [name for name in ("frida", "elftools") if find_spec(name) is None]
    if missing:
        raise UserError(f"--candidate {PREFIX}: {missing[0]} is missing: pip install frida pyelftools")
    return CandidateSource(partial(_load, words))


def _words(spec: str) -> list[str]:
    try:
        words = split_line(spec.removeprefix(PREFIX))
    except ValueError as error:
        raise UserError(f"--candidate {spec}: {error}") from None
    if not words:
        raise UserError(f"--candidate {spec}: no program; expected record: ./engine and its own words")
    return words


def _load(words: Sequence[str], context: Context) -> Trace:
    with scratch_directory() as place:
        folder = Path(place)
        context.progress(f"running {words[0]}")
        log = run_program(words, folder, context.timeout)
        if not len(log.spans):
            raise UserError(f"{words[0]}: none of its {len(log.about['functions'])} functions was called")
        context.progress("looking for its values")
        search = Search(Memory(log))
        found = align(context.model, search, context.tokens)
    said = {"name": Path(words[0]).name, "version": "as it is", **_said(found.rows, log, search)}
    if found.nowhere is not None:
        rows = found.rows[found.nowhere]
        lacking = max(row for row in range(len(rows.values)) if row not in rows.places)
        said[NOWHERE] = f"{found.nowhere}, token {lacking}"
    return as_trace(found.rows, context, said)


def run_program(words: Sequence[str], folder: Path, timeout: float) -> Log:
    """Run a program with its memory looked at -> the log. Raises UserError if it cannot be run, fails or hangs."""
    output = folder / "output"
    program = shutil.which(words[0])
    if program is None:
        raise UserError(f"{words[0]}: cannot be run (no such program)")
    command = python_child.command("llamadiff.ext.record.native", str(folder), str(MOST), program, *words[1:])
    until = time.monotonic() + timeout
    with output.open("wb") as stream:
        streams = {"stdin": subprocess.DEVNULL, "stdout": stream, "stderr": stream}
        with supervise(command, streams) as running:
            while running.runs and time.monotonic() < until:
                running.wait(0.2)
            if running.runs:
                raise UserError(f"{words[0]}: still running after {timeout:g} s (--timeout){tail_of(output)}")
    if not (folder / "about").exists():
        raise UserError(f"{words[0]}: its recording died{tail_of(output)}")
    log = Log(folder)
    if "error" in log.about:
        raise UserError(f"{words[0]}: cannot be run ({log.about['error']})")
    if log.about["code"]:
        raise UserError(f"{words[0]}: {how_it_ended(log.about['code'])}{tail_of(output)}")
    return log


def as_trace(rows: Mapping[str, Rows], context: Context, producer: Mapping[str, Any]) -> Trace:
    """What was found, as a trace. Raises UserError if that is nothing."""
    found = {name: each for name, each in rows.items() if each.places}
    if "embd" not in found:
        raise UserError(
            f"{producer['name']}: of {len(context.tokens)} tokens no embedding lay in its memory at any of "
            f"{producer['stops']} stops; was it given this model and this prompt?"
        )
    arrays, known, kept = {}, {}, {}
    for name, each in found.items():
        arrays[name] = each.values.astype(np.float32)
        if len(each.places) < len(each.values):
            there = np.isin(np.arange(len(each.values)), list(each.places))
            known[name] = np.broadcast_to(there.reshape(-1, *[1] * (each.values.ndim - 1)), each.values.shape)
            arrays[name] = np.where(known[name], arrays[name], 0)
        if (dtype := DTYPES.get(next(iter(each.places.values())).place.dtype)) is not None:
            kept[name] = dtype
    n = len(context.tokens)
    info = Info(context.tokens, tuple(range(n)), min(context.n_prefill or n, n), None, {**producer}, {})
    printed = Printed(notes=(_told(rows),))
    return Trace(info, arrays, dict.fromkeys(arrays, "F32"), known=known, kept=kept, printed=printed)


def _told(rows: Mapping[str, Rows]) -> str:
    """What was found, and the first taps that were not."""
    count, every = sum(len(each.places) for each in rows.values()), sum(len(each.values) for each in rows.values())
    lacking = [name for name, each in rows.items() if len(each.places) < len(each.values)]
    says = f"{count} of {every} rows of its taps lay in its memory"
    more = f" and {len(lacking) - FEW} more" if len(lacking) > FEW else ""
    return says + (f"; not all of {', '.join(lacking[:FEW])}{more}" if lacking else "")


def _said(rows: Mapping[str, Rows], log: Log, search: Search) -> dict[str, Any]:
    places = [each for some in rows.values() for each in some.places.values()]
    return {"stops": len(log.stops), "rows": len(places), "dtype": search.dtypes[0]}
