"""Where a candidate comes from: every source ends in the same trace."""

from __future__ import annotations

from pathlib import Path

from llamadiff.errors import UserError
from llamadiff.trace import Trace


def resolve(spec: str) -> Trace:
    """The trace that a ``--candidate`` names. Raises UserError if it names none."""
    path = Path(spec)
    if path.suffix == ".safetensors" or path.is_file():
        return Trace.open(path)
    raise UserError(
        f"--candidate {spec}: no such trace; give a .safetensors file (captures/README.md says what is in it)"
    )
