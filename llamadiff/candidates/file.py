"""A ``.safetensors`` file: a trace, or bare tensors under an engine's own names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

from llamadiff.candidates.source import Context, Opened, Piece, assemble, register
from llamadiff.trace import KEY, Trace


@register
class File:
    """``--candidate FILE.safetensors``."""

    def matches(self, spec: str) -> bool:
        path = Path(spec)
        return path.is_file() and path.suffix != ".npz"

    def files(self, spec: str) -> Iterable[Path]:
        return [Path(spec)]

    def open(self, spec: str) -> Opened:
        trace = Trace.open(spec, bare=True)
        untold = f"{spec}: no {KEY!r} entry in __metadata__, which would hold the token ids (captures/README.md)"
        return Opened(partial(_loaded, trace), trace.info.tokens, untold)


def _loaded(trace: Trace, context: Context) -> Trace:
    """A trace as it is, where names and layouts are the taps' own; else what the map makes of it."""
    info = trace.info
    if not info.tokens:
        info = replace(info, tokens=context.tokens, positions=tuple(range(len(context.tokens))),
                       n_prefill=len(context.tokens))  # fmt: skip
    if context.is_identity and any(tap.name in trace for tap in context.model.taps):
        return trace.saying(info)
    whole = assemble((Piece(name, trace[name]) for name in trace), context, info.producer, info.tokens)
    return whole.saying(info)
