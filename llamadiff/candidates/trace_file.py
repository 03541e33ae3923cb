"""A ``.safetensors`` file: a trace, or bare tensors under an engine's own names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

from llamadiff.candidates.pieces import Unread, named_row
from llamadiff.candidates.source import CandidateSource, Context, assemble
from llamadiff.system.errors import UserError
from llamadiff.trace.metadata import KEY
from llamadiff.trace.reader import Array, Trace


def matches(spec: str) -> bool:
    """Any other file."""
    path = Path(spec)
    return path.is_file() and path.suffix != ".npz"


def files(spec: str) -> Iterable[Path]:
    """The file."""
    return [Path(spec)]


def open_source(spec: str) -> CandidateSource:
    """The trace; its tensors are read when they are wanted."""
    trace = Trace.open(spec, bare=True)
    if trace.sketch is not None:
        raise UserError(f"{spec}: is a sketch, which keeps no tensors; give it to llamadiff check, as a recording")
    untold = f"{spec}: no {KEY!r} entry in __metadata__, which would hold the token ids (docs/trace-format.md)"
    run = trace.info if trace.info.tokens else None
    return CandidateSource(partial(_load_trace, trace), trace.info.tokens, untold, recorded=True, run=run)


def apply_map(trace: Trace, context: Context) -> Trace:
    """A trace in memory under a map; without one it stays as it is."""
    return trace if context.is_identity else _load_trace(trace, context)


def _load_trace(trace: Trace, context: Context) -> Trace:
    """A trace as it is, where names and layouts are the taps' own; else what the map makes of it."""
    info = trace.info
    if not info.tokens:
        info = replace(info, tokens=context.tokens, positions=tuple(range(len(context.tokens))),
                       n_prefill=context.n_prefill)  # fmt: skip
    pieces = {name: named_row(name) for name in trace}
    as_it_is = any(tap.name in trace for tap in context.model.taps) and all(row is None for _, row in pieces.values())
    if context.is_identity and as_it_is:
        return trace.saying(info)
    made = (Unread(word, row, trace.shape(name), partial(_values, trace, name)) for name, (word, row) in pieces.items())
    whole = assemble(made, context, info.producer, info.tokens)
    return whole.saying(replace(info, producer=whole.info.producer))


def _values(trace: Trace, name: str, _most: int) -> tuple[Array, None]:
    return trace[name], None
