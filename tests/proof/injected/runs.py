"""Runs with an injected mistake, as the traces that are judged."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from llamadiff.trace.metadata import Info
from llamadiff.trace.reader import Trace
from proof.injected.base import TOKENS
from proof.strangers.arithmetic import BY_NAME
from proof.strangers.engine import Bug, Engine
from proof.strangers.model import read

opened = lru_cache(maxsize=32)(read)


def record_faulty(
    bug: Bug, path: Path, tokens: Sequence[int] = TOKENS, n_prefill: int = 0, name: str = "mine"
) -> Trace:
    """Every tap of a run of somebody's engine that computes in float32."""
    taps = Engine(opened(path), BY_NAME["float32"], bug).run(tokens, n_prefill)
    kinds = {name: "I32" if values.dtype.kind == "i" else "F32" for name, values in taps.items()}
    info = Info(tuple(tokens), tuple(range(len(tokens))), n_prefill or len(tokens), producer={"name": name})
    return Trace(info, taps, kinds)
