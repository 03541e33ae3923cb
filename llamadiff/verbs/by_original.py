"""A candidate that ran the original checkpoint: what differs between that and the file is the file's fault."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llamadiff.engines.model_file import Runnable
from llamadiff.judge.preflight.checks import Check
from llamadiff.result.comparison import Judged


@dataclass(frozen=True)
class Original:
    """The checkpoint that a file was made of, as a right conversion would be: its ``model``, in float32.

    ``checks``: where the file certainly is another.
    """

    model: Runnable
    label: str
    checks: tuple[Check, ...]


def by_the_original(judged: Judged, original: Original) -> Judged:
    """What was found, with the file's faults before it.

    llama.cpp multiplied by the file's weights: by the checkpoint's its taps say nothing, and how far the two drift
    apart is what the file's types cost.
    """
    rows = tuple(replace(row, baseline_local=None, expected_drift=None, ratio_to_noise=None) for row in judged.rows)
    note = f"the candidate was judged by the weights of {original.label}, which it ran, and not by the file's"
    return replace(
        judged, rows=rows, preflight=(*judged.preflight, *original.checks), notes=(*judged.notes, note),
        only_engine_read=(), blamed=(),
    )  # fmt: skip
