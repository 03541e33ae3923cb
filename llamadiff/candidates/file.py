"""A ``.safetensors`` file: a trace, or bare tensors under an engine's own names."""

from __future__ import annotations

from pathlib import Path

from llamadiff.candidates.source import Context, Piece, assemble, register
from llamadiff.errors import UserError
from llamadiff.trace import Trace


@register
class File:
    """``--candidate FILE.safetensors``."""

    def matches(self, spec: str) -> bool:
        path = Path(spec)
        return path.is_file() and path.suffix != ".npz"

    def load(self, spec: str, context: Context) -> Trace:
        trace = Trace.open(spec, context.tokens)
        present = {tap.name for tap in context.model.taps}
        if present & set(trace) and context.is_identity:
            return trace
        whole = assemble((Piece(name, trace[name]) for name in trace), context, trace.info.producer, trace.info.tokens)
        return Trace(trace.info, {name: whole[name] for name in whole}, whole.dtypes, None, whole.known)


def tokens_of(spec: str) -> tuple[int, ...]:
    """The token ids of a trace; none if the file is no trace of its own."""
    try:
        return Trace.open(spec).info.tokens
    except UserError:
        return ()
