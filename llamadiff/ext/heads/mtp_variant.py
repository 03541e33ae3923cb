"""The variant ``mtp=N``: llama.cpp drafts N tokens a step with the model's own head, and the text stays what it is."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.heads.draft_judge import Drafts, Judge
from llamadiff.ext.heads.head_observer import no_head
from llamadiff.ext.heads.speculation import Asked, Speculation, speculate
from llamadiff.ext.state.result import Variant
from llamadiff.ext.state.scheduled import halves_in
from llamadiff.ext.state.variation import OwnWay
from llamadiff.llamacpp.request import Request
from llamadiff.llamacpp.settings_words import count_reader
from llamadiff.system.progress import Progress

KEY = "mtp"
WANTED = 16  # tokens that are generated where nobody says how many


def check(model: ModelFile) -> None:
    """Raise UserError for a model without a head."""
    if not model.weights.fields.get(f"{model.architecture}.nextn_predict_layers"):
        raise no_head(str(model.path))


def run(name: str, drafts: int, request: Request, progress: Progress, patience: float) -> Variant:
    """Draft, verify and judge. What was generated of the request's tokens is generated again. Raises UserError."""
    started = time.perf_counter()
    count = len(request.tokens) - (request.n_prefill or len(request.tokens))
    prompt = request.tokens[: len(request.tokens) - count]
    judge = partial(_judge, halves=halves_in(request.model))
    asked = replace(request, tokens=prompt, n_predict=count or WANTED)
    found: Drafts = speculate(asked, drafts, judge, progress, patience)
    seconds = time.perf_counter() - started
    ties = f", {len(found.ties)} decided by rounding" if found.ties else ""
    return Variant(
        name, found.verdict, seconds, found.faults, found.judged, (found.faults or found.ties or ("",))[0],
        counted=f"accepted {found.accepted} of {found.drafted}{ties}", drafted=found.drafted, accepted=found.accepted,
    )  # fmt: skip


def _judge(run: Speculation, halves: float) -> Asked:
    return Judge(run, halves).questions()


MTP = OwnWay(KEY, count_reader(KEY, 1, 16), check, run)
