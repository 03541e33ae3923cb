"""Opens what ``--candidate`` names. Every kind of source is a module of three functions of it: see ``KINDS``."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamadiff.system.errors import UserError
from llamadiff.system.input import check_regular

if TYPE_CHECKING:
    from llamadiff.candidates.source import Context, Opened
    from llamadiff.trace.reader import Trace

# The first that ``matches`` takes a --candidate; its ``files`` are those that are read for it, and ``opened`` reads it.
# The last two raise UserError if that cannot be.
KINDS = ("llama_cpp", "gguf_file", "command", "dump", "log", "trace_file", "transformers")


def open_candidate(spec: str) -> Opened:
    """What a ``--candidate`` stands for, read. Raises UserError if it stands for nothing, or cannot be read."""
    found: Opened = source_of(spec).opened(spec)
    return found


def resolve(spec: str, context: Context) -> Trace:
    """The trace that a ``--candidate`` stands for. Raises UserError if it stands for none."""
    return open_candidate(spec).load(context)


def files_of(spec: str) -> list[Path]:
    """The files that are read for a ``--candidate``."""
    return list(source_of(spec).files(spec))


def source_of(spec: str) -> Any:
    """The module of the kind of source that a ``--candidate`` names. Raises UserError if it names none."""
    from llamadiff.candidates.foreign import refuse_foreign

    refuse_foreign(spec)
    for kind in KINDS:
        source = import_module(f"llamadiff.candidates.{kind}")
        if source.matches(spec):
            return source
    check_regular(Path(spec), "a trace, a dump or a command")
    raise UserError(
        f"--candidate {spec}: no such trace or dump; give a .safetensors trace, a directory of arrays, a log, "
        '"cmd: ./engine --tokens {tokens} --dump {out}", llama.cpp:KEY=VALUE, or transformers:'
    )
