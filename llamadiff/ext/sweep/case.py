"""Runs one case of a sweep, in whatever process: a row of plain values comes of it, always."""

from __future__ import annotations

import math
import os
import socket
import time
from dataclasses import dataclass, replace

from llamadiff.engines.run_spec import How, Run
from llamadiff.ext.sweep.plan import SweepCase, settings_in_words
from llamadiff.judge.verdict import of_refusal, of_unjudged
from llamadiff.llamacpp.settings_words import settings_of
from llamadiff.system.errors import DiedError, UserError
from llamadiff.system.exits import reason


@dataclass(frozen=True)
class SweepRow:
    """What came of a case. ``verdict`` is UNCHECKED with a ``refused`` where it could not be judged; ``kl`` and
    ``same_first`` are of the last token; ``worst`` is the largest own error, at ``worst_tap``; ``loss`` the mean KL of
    two files; ``made_of``: what its files held, where that can be told."""

    key: str
    model: str
    prompt: str
    candidate: str
    settings: str
    n_predict: int
    verdict: str
    headline: str = ""
    first_wrong: str = ""
    wrong: int = 0
    judged: int = 0
    worst: float = math.nan
    worst_tap: str = ""
    kl: float = math.nan
    same_first: bool | None = None
    loss: float = math.nan
    refused: str = ""
    seconds: float = 0.0
    worker: str = ""
    made_of: str = ""


def run_case(case: SweepCase, threads: int = 0) -> SweepRow:
    """Judge a case; what a user could mend is in the row, and so is a fault of our own.

    ``threads``: for a case that does not say how many it wants (0: all).
    """
    started = time.perf_counter()
    try:
        row = _judged(case, threads)
    except UserError as error:
        row = replace(unjudged(case, str(error)), verdict=of_refusal(isinstance(error, DiedError)))
    except Exception as error:  # one case's, and no reason to end the others
        row = unjudged(case, reason(error, "llamadiff"))
    return replace(row, seconds=time.perf_counter() - started, worker=f"{socket.gethostname()}:{os.getpid()}")


def unjudged(case: SweepCase, refused: str = "") -> SweepRow:
    """The row of a case that nobody has judged, or could."""
    about = (case.key, case.model, case.prompt, case.candidate, case.way, case.n_predict)
    return SweepRow(*about, verdict=of_unjudged(), refused=refused)


def _judged(case: SweepCase, threads: int) -> SweepRow:
    from llamadiff.verbs import verbs

    settings = settings_of([f"threads={threads}", *settings_in_words(case.settings)])
    run = Run(case.prompt, chat=case.chat, n_predict=case.n_predict, settings=settings)
    result = verbs.compare(case.model, run, case.candidate or None, How(timeout=case.timeout))
    own = [(row.local.nmse, row.tap) for row in result.rows if row.local is not None and math.isfinite(row.local.nmse)]
    worst, tap = max(own, default=(math.nan, ""))
    first = result.first_divergence
    return replace(
        unjudged(case),
        verdict=result.verdict, headline=result.headline, first_wrong=first.tap if first is not None else "",
        wrong=len(result.wrong), judged=len(own), worst=worst, worst_tap=tap,
        kl=result.logits.kl if result.logits is not None else math.nan,
        same_first=result.logits.top1_agree if result.logits is not None else None,
        loss=result.more["loss"].kl.value if "loss" in result.more else math.nan,
    )  # fmt: skip
