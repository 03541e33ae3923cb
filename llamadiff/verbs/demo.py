"""The shipped model, right and then with a bug in it: what a report looks like, in a few seconds."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from llamaref import Engine, ops

from llamadiff.candidates.reference import record
from llamadiff.engines.run_spec import How, Run
from llamadiff.llamacpp.request import Settings
from llamadiff.llamacpp.shipped import shipped_model
from llamadiff.result.comparison import Comparison
from llamadiff.system.progress import Progress
from llamadiff.verbs.verbs import compare

PROMPT = "Once upon a time"
BUG = "rotates halves (i, i+32) where this model wants pairs (2i, 2i+1)"


def run(progress: Progress, settings: Settings | None = None) -> tuple[Comparison, Comparison]:
    """llama.cpp against the engine, and llama.cpp against an engine whose RoPE rotates the wrong pairs.

    ``settings``: llama.cpp's.
    """
    model = shipped_model()
    run, how = Run(PROMPT, settings=settings or Settings()), How(progress=progress)
    right = compare(model, run, how=how)
    return right, compare(model, run, _faulty(model, right), how)


def _faulty(model: Path, right: Comparison) -> Any:
    maths = SimpleNamespace(**{**vars(ops), "rope_pairs": ops.rope_halves})
    return record(Engine(model, maths=maths), [token for token, _ in right.tokens], "my-engine")
