"""Opens what is given as a candidate: what ``--candidate`` names, a trace in memory, or a Python function.

Every kind of source that has a name is a module of three functions of it: see ``KINDS``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from llamadiff.candidates.foreign import refuse_foreign
from llamadiff.candidates.pieces import Piece, named_row
from llamadiff.candidates.source import Context, Opened, assemble
from llamadiff.candidates.trace_file import mapped
from llamadiff.system.errors import UserError
from llamadiff.system.input import check_regular
from llamadiff.trace.reader import Trace

# The first that ``matches`` takes a --candidate; its ``files`` are those that are read for it, and ``opened`` reads it.
# The last two raise UserError if that cannot be.
KINDS = ("llama_cpp", "gguf_file", "command", "dump", "log", "trace_file", "transformers")


def open_candidate(candidate: Trace | str | Path | Callable[..., Any]) -> Opened:
    """A candidate, read. Raises UserError if it stands for nothing, or cannot be read.

    A function is given the token ids, and if it has a parameter ``n_prefill``, how many to run first, the others one by
    one. It returns arrays by name, a Trace, or the path of what it wrote.
    """
    if isinstance(candidate, Trace):
        return Opened(partial(mapped, candidate), candidate.info.tokens, run=candidate.info)
    if callable(candidate):
        return Opened(partial(_computed, candidate))
    spec = str(candidate)
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


def _computed(run: Callable[..., Any], context: Context) -> Trace:
    name = str(getattr(run, "__name__", type(run).__name__))
    more = {"n_prefill": context.n_prefill} if "n_prefill" in inspect.signature(run).parameters else {}
    given = run(list(context.tokens), **more)
    if isinstance(given, Trace):
        return mapped(given, context)
    if isinstance(given, (str, Path)):
        return resolve(str(given), context)
    if not isinstance(given, Mapping):
        kind = type(given).__name__
        raise UserError(f"{name}: gave {kind}; expected arrays by the names of taps, a Trace, or the path of a file")
    return assemble((_piece(key, value) for key, value in given.items()), context, {"name": name})


def _piece(name: object, value: Any) -> Piece:
    """One tensor. Raises UserError for what is no array of numbers."""
    array = np.asarray(value)
    if array.dtype.kind not in "fiu":
        raise UserError(f"{name}: is of type {array.dtype}; expected an array of numbers")
    word, row = named_row(str(name))
    return Piece(word, array, row)
