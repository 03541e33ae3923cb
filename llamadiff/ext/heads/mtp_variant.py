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
from llamadiff.llamacpp.request import Request, Settings
from llamadiff.llamacpp.settings_words import count_reader
from llamadiff.system.progress import Progress

KEY = "mtp"
BITS = {"F16": 11, "BF16": 8, "Q8_0": 8, "Q5_0": 5, "Q4_0": 4}  # that a cache keeps of a value, or of a block's largest
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
    judge = partial(_judge, rounding=max(halves_in(request.model), cache_rounding(request.settings)))
    asked = replace(request, tokens=prompt, n_predict=count or WANTED)
    found: Drafts = speculate(asked, drafts, judge, progress, patience)
    seconds = time.perf_counter() - started
    ties = f", {len(found.ties)} decided by rounding" if found.ties else ""
    return Variant(
        name, found.verdict, seconds, found.faults, found.judged, (found.faults or found.ties or ("",))[0],
        counted=f"accepted {found.accepted} of {found.drafted}{ties}", drafted=found.drafted, accepted=found.accepted,
    )  # fmt: skip


def cache_rounding(settings: Settings) -> float:
    """What the caches' rounding comes to: which way a value falls may hang on the batch that it was computed in."""
    kinds = {settings.type_k, settings.type_v, "F16" if settings.flash_attn else "F32"}
    return max(2.0 ** (-2 * BITS[kind]) / 3 if kind in BITS else 0.0 for kind in kinds)


def _judge(run: Speculation, rounding: float) -> Asked:
    return Judge(run, rounding).questions()


MTP = OwnWay(KEY, count_reader(KEY, 1, 16), check, run)
