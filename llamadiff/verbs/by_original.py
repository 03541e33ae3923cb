"""A candidate that ran the original checkpoint: what differs between that and the file is the file's fault."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamadiff.candidates.transformers import checkpoint_of
from llamadiff.engines.model_file import Runnable
from llamadiff.judge.preflight.checks import Check
from llamadiff.judge.verdict import of_check
from llamadiff.result.comparison import Judged
from llamadiff.system.progress import Progress

if TYPE_CHECKING:
    from llamadiff.weights.original import Original


def original_behind(candidate: Any, model: Runnable, progress: Progress) -> Original | None:
    """The checkpoint that a candidate runs, where it can stand in for the file."""
    folder = checkpoint_of(str(candidate)) if isinstance(candidate, (str, Path)) else None
    if folder is None or model.by_graph:
        return None
    from llamadiff.weights.original import original_of  # here: a tenth of all that is imported, for few runs

    return original_of(model, folder, progress)


def by_the_original(judged: Judged, original: Original) -> Judged:
    """What was found, with the file's faults before it.

    llama.cpp multiplied by the file's weights: by the checkpoint's its taps say nothing, and how far the two drift
    apart is what the file's types cost.
    """
    checks = [Check(f"{original.faulty}'s {fault.where}", of_check(fault), fault.says) for fault in original.faults]
    rows = tuple(replace(row, baseline_local=None, expected_drift=None, ratio_to_noise=None) for row in judged.rows)
    note = f"the candidate was judged by the weights of {original.label}, which it ran, and not by the file's"
    return replace(
        judged, rows=rows, preflight=(*judged.preflight, *checks), notes=(*judged.notes, note), only_engine_read=(),
        blamed=(),
    )  # fmt: skip
