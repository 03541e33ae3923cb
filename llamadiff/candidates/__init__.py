"""Where a candidate comes from. Every source, one module each, registers itself and ends in the same trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llamadiff.errors import UserError

if TYPE_CHECKING:
    from llamadiff.candidates.source import Context, Source
    from llamadiff.trace import Trace


def resolve(spec: str, context: Context) -> Trace:
    """The trace that a ``--candidate`` stands for. Raises UserError if it stands for none."""
    return source_of(spec).load(spec, context)


def source_of(spec: str) -> Source:
    """The kind of source that a ``--candidate`` names. Raises UserError if it names none."""
    from llamadiff.candidates import command, dump, file, transformers
    from llamadiff.candidates.source import SOURCES

    del command, dump, file, transformers  # imported for their registration
    for source in SOURCES:
        if source.matches(spec):
            return source
    raise UserError(
        f"--candidate {spec}: no such trace or dump; give a .safetensors trace, a directory of arrays, "
        '"cmd: ./engine --tokens {tokens} --dump {out}", or transformers:'
    )


def tokens_of(spec: str) -> tuple[int, ...]:
    """The token ids that a candidate states before it is loaded; none if it does not."""
    from pathlib import Path

    from llamadiff.candidates import dump, file

    return file.tokens_of(spec) if Path(spec).is_file() else dump.tokens_of(spec)
