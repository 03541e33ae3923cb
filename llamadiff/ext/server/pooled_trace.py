"""A trace of nothing but the pooled vector of a text, told from others before anything is run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from llamadiff.system.errors import UserError
from llamadiff.trace.reader import Trace

if TYPE_CHECKING:
    from llamadiff.candidates.opening import CandidateSpec

POOLED = "result_embd_pooled"  # llama.cpp's name


def is_pooled_alone(candidate: CandidateSpec | None) -> bool:
    """Whether it is a trace of nothing but a pooled vector."""
    try:
        trace = opened_trace(candidate)
    except UserError:  # which whoever opens it says
        return False
    return trace is not None and trace.sketch is None and [*trace] == [POOLED]


def opened_trace(candidate: CandidateSpec | None) -> Trace | None:
    """A trace in memory, or that of a file; None for what is neither. Raises UserError for a damaged file."""
    if isinstance(candidate, (str, Path)):
        path = Path(candidate)
        return Trace.open(path, bare=True) if path.suffix == ".safetensors" and path.is_file() else None
    return candidate if isinstance(candidate, Trace) else None
