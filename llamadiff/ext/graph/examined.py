"""Which of ggml's ops are judged, for the doctor."""

from __future__ import annotations

from collections.abc import Iterable

from llamadiff.ext.graph.op import UNJUDGED, function_of
from llamadiff.llamacpp.doctor import NOTE, OK, Examined


def ops_judged(ops: Iterable[str]) -> Examined:
    """Of ggml's ops by name: how many are judged, and those that are not."""
    names = sorted(ops)
    unknown = [name for name in names if function_of(name) is None]
    new = [name for name in unknown if name not in UNJUDGED]
    judged = f"{len(names) - len(unknown)} of {len(names)} in its ggml.h"
    if new:
        return Examined("ops judged", NOTE, f"{judged}; UNCHECKED, as llamadiff does not know them: {', '.join(new)}")
    rest = f"; UNCHECKED, as a program's own or of training: {', '.join(unknown)}" if unknown else ""
    return Examined("ops judged", OK, judged + rest)
