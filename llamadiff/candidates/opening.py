"""Opens what ``--candidate`` names. Every kind of source is a module that registers itself and gives a trace."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from llamadiff.system.errors import UserError
from llamadiff.system.input import check_regular

if TYPE_CHECKING:
    from llamadiff.candidates.source import CandidateKind, Context, Opened
    from llamadiff.trace.reader import Trace

KINDS = (
    "llama_cpp",
    "gguf_file",
    "command",
    "dump",
    "log",
    "trace_file",
    "transformers",
)  # each registers itself when it is imported


def open_candidate(spec: str) -> Opened:
    """What a ``--candidate`` stands for, read. Raises UserError if it stands for nothing, or cannot be read."""
    return source_of(spec).open(spec)


def resolve(spec: str, context: Context) -> Trace:
    """The trace that a ``--candidate`` stands for. Raises UserError if it stands for none."""
    return open_candidate(spec).load(context)


def files_of(spec: str) -> list[Path]:
    """The files that are read for a ``--candidate``."""
    return list(source_of(spec).files(spec))


def source_of(spec: str) -> CandidateKind:
    """The kind of source that a ``--candidate`` names. Raises UserError if it names none."""
    from llamadiff.candidates.foreign import refuse_foreign
    from llamadiff.candidates.source import CANDIDATE_KINDS

    for kind in KINDS:
        import_module(f"llamadiff.candidates.{kind}")
    refuse_foreign(spec)
    for source in sorted(CANDIDATE_KINDS, key=lambda source: KINDS.index(type(source).__module__.rpartition(".")[2])):
        if source.matches(spec):
            return source
    check_regular(Path(spec), "a trace, a dump or a command")
    raise UserError(
        f"--candidate {spec}: no such trace or dump; give a .safetensors trace, a directory of arrays, a log, "
        '"cmd: ./engine --tokens {tokens} --dump {out}", llama.cpp:KEY=VALUE, or transformers:'
    )
