"""``record: ./engine -m model.bin -i "Once"``: a program that was not changed; its values are found in its memory."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from llamadiff.candidates.command import tail_of, words_of
from llamadiff.candidates.source import CandidateSource, Context
from llamadiff.ext.record.align import Alignment, align
from llamadiff.ext.record.log import NO_CODE, Log
from llamadiff.ext.record.rows import Rows
from llamadiff.ext.record.scripts import runners_of, title_of
from llamadiff.ext.record.search import Memory, Search
from llamadiff.llamacpp.capture import scratch_directory
from llamadiff.system import python_child
from llamadiff.system.errors import UserError
from llamadiff.system.libraries import HERE, LINUX
from llamadiff.system.python_child import how_it_ended
from llamadiff.system.supervised import supervise
from llamadiff.trace.metadata import Info
from llamadiff.trace.reader import Printed, Trace

PREFIX = "record:"
NOWHERE, TAKEN = "nowhere", "taken"  # keys of a producer: the first values that were not in its memory; its ids
VARIABLES = "variables"  # the key of one whose values were seen where it gave them names, not in its memory
FEW = 3  # taps that are named
MOST = 1 << 30  # bytes of a program's writes that are kept
MOST_IDS, SHOWN = 64, 12  # ids of a program's that are kept, and of llama.cpp's that are shown
SHORT = ("f16", "bf16")  # dtypes of which a trace says that values had them
ELF = b"\x7fELF"  # how a compiled program begins
NATIVE = "llamadiff.ext.record.native"
RECORDERS = {  # of what runs a script
    r"(python|pypy)w?[0-9.]*(\.exe)?": "llamadiff.ext.record.python_program",
    r"node(js)?[0-9.]*(\.exe)?": "llamadiff.ext.record.javascript",
}
_INTERPRETER = re.compile(r"(java|perl|ruby|bash|dash|sh|deno|bun)[0-9.]*")
# What runs another program in its own place, or as a child: neither is looked at.
WRAPPERS = {"env", "nice", "nohup", "taskset", "time", "timeout", "setsid", "stdbuf", "sudo", "make", "xargs", "gdb"}
WRITER = "docs/engines.md says how an engine writes what it computes"


def matches(spec: str) -> bool:
    """Whether it is a program to be recorded."""
    return spec.startswith(PREFIX)


def files(spec: str) -> Iterator[Path]:
    """The files that its words name."""
    return (path for word in words_of(spec, PREFIX) if (path := Path(word)).name and path.is_file())


def open_source(spec: str) -> CandidateSource:
    """The program, which is run once the tokens are known. Raises UserError where it cannot be recorded."""
    program, *arguments = words_of(spec, PREFIX)
    found = shutil.which(program)
    if found is None:
        raise UserError(f"{program}: cannot be run ({_why_not(Path(program))})")
    if Path(program).name in WRAPPERS:
        raise UserError(f"{program}: starts another program; give that one: -- {' '.join(arguments) or './engine ...'}")
    return CandidateSource(partial(_load, _recorder_of(program, found), [found, *arguments]))


def _why_not(path: Path) -> str:
    if path.is_dir():
        return "a directory"
    if path.is_file():
        return f"not executable: chmod +x {path}, or name what runs it: python {path}"
    return "no such program"


def _recorder_of(program: str, path: str) -> str:
    """The module whose ``main(folder, most, *words)`` runs a program and keeps what it writes as a log."""
    runners = runners_of(Path(path))
    for pattern, recorder in RECORDERS.items():
        if any(re.fullmatch(pattern, name) for name in runners):
            return recorder
    with open(path, "rb") as file:
        is_compiled = file.read(len(ELF)) == ELF
    if not is_compiled or any(_INTERPRETER.fullmatch(name) for name in runners):
        raise UserError(f"{program}: is no compiled program, nor python or node; name the engine itself; {WRITER}")
    if HERE is not LINUX:
        raise UserError(f"{PREFIX} of a compiled program needs Linux; {WRITER}")
    missing = [name for name in ("frida", "elftools") if find_spec(name) is None]
    if missing:
        raise UserError(f"--candidate {PREFIX}: {missing[0]} is missing: pip install frida pyelftools")
    return NATIVE


def _load(recorder: str, words: Sequence[str], context: Context) -> Trace:
    name = Path(words[0]).name if recorder == NATIVE else title_of(words)
    with scratch_directory() as place:
        context.progress(f"running {name}")
        log, ended = run_program(recorder, words, Path(place), context.timeout)
        if not log.words.size:
            raise UserError(f"{name}: {ended or f'wrote nothing at any of {log.stops} stops'}")
        context.progress("looking for its values")
        for part in dict.fromkeys([log.without_matrices(), log]):  # all of it where values are as large as weights
            search = Search(Memory(part))
            found = align(context.model, search, context.tokens)
            if found.rows["embd"].places:
                break
    producer: dict[str, Any] = {"name": name, "version": "as it is", "stops": log.stops, "dtype": search.dtypes[0]}
    if recorder != NATIVE:
        producer[VARIABLES] = True
    if found.nowhere is not None:
        producer[NOWHERE] = "{}, token {}".format(*found.nowhere)
        producer[TAKEN] = list(found.ids[:MOST_IDS])
    return as_trace(found, context, producer, ended)


def other_ids(ours: Sequence[int], theirs: Sequence[int]) -> str:
    """What is said of a program that took other ids than llama.cpp; nothing if its are the first of llama.cpp's."""
    if {*ours} <= {*theirs} or [*ours[: len(theirs)]] == [*theirs]:
        return ""
    right = " ".join(map(str, ours[:SHOWN])) + " ..." * (len(ours) > SHOWN)
    return (
        f"it took other ids than llama.cpp's {right}: to judge what it makes of its own, --tokens "
        f"{','.join(map(str, theirs))} in place of the prompt (the last of these may be what it generated)"
    )


def run_program(recorder: str, words: Sequence[str], folder: Path, timeout: float) -> tuple[Log, str]:
    """Run a program, by a module that keeps what it writes -> the log, and how it ended if not well.

    Raises UserError if it cannot be recorded, or hangs.
    """
    output = folder / "output"
    command = python_child.command(recorder, str(folder), str(MOST), *words)
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
    if log.error:
        raise UserError(f"{words[0]}: cannot be recorded ({log.error})")
    if log.code:
        how = "crashed, or was killed" if log.code == NO_CODE else how_it_ended(log.code)
        return log, f"{how}{tail_of(output)}"
    if log.words.nbytes > MOST:
        return log, f"wrote more than {MOST >> 30} GiB; let it generate one token, of a shorter prompt"
    return log, ""


def as_trace(alignment: Alignment, context: Context, producer: Mapping[str, Any], ended: str) -> Trace:
    """What was found, as a trace; ``ended``: how the program did if not well. Raises UserError if nothing was found."""
    rows = alignment.rows
    found = {name: each for name, each in rows.items() if each.places}
    if not found:
        nothing = f"of {len(context.tokens)} tokens nothing lay in its memory at any of {producer['stops']} stops; "
        nothing += "was it given this model and this prompt, or does another program compute, which it starts?"
        raise UserError(
            f"{producer['name']}: {ended or other_ids(context.tokens, alignment.ids[:MOST_IDS]) or nothing}"
        )
    arrays, known, kept = {}, {}, {}
    for name, each in found.items():
        arrays[name] = each.values.astype(np.float32)
        if len(each.places) < len(each.values):
            there = np.isin(np.arange(len(each.values)), list(each.places))
            known[name] = np.broadcast_to(there.reshape(-1, *[1] * (each.values.ndim - 1)), each.values.shape)
            arrays[name] = np.where(known[name], arrays[name], 0)
        if (dtype := next(iter(each.places.values())).place.dtype) in SHORT:
            kept[name] = dtype
    n = len(context.tokens)
    info = Info(context.tokens, tuple(range(n)), min(context.n_prefill or n, n), None, {**producer}, {})
    ids = (
        other_ids(context.tokens, alignment.ids[:MOST_IDS]) if alignment.is_wrong else ""
    )  # else the first of what is said
    notes = tuple(note for note in (ids, f"{producer['name']} {ended}" if ended else "") if note)
    printed = Printed(notes=(*notes, _coverage_note(rows)))
    return Trace(info, arrays, dict.fromkeys(arrays, "F32"), known=known, kept=kept, printed=printed)


def _coverage_note(rows: Mapping[str, Rows]) -> str:
    """What was found, and the first taps that were not."""
    count, every = sum(len(each.places) for each in rows.values()), sum(len(each.values) for each in rows.values())
    lacking = [name for name, each in rows.items() if len(each.places) < len(each.values)]
    says = f"{count} of {every} rows of its taps lay in its memory"
    more = f" and {len(lacking) - FEW} more" if len(lacking) > FEW else ""
    return says + (f"; not all of {', '.join(lacking[:FEW])}{more}" if lacking else "")
