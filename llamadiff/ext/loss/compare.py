"""Two files of one model through llama.cpp: whether the code is right, what the other file's types cost, and where."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llamadiff.candidates.opening import CandidateSpec
from llamadiff.engines.capture_request import request_for
from llamadiff.engines.model_file import ModelFile, Runnable
from llamadiff.engines.run_spec import How, Run
from llamadiff.engines.select import after_what_the_engine_said, capture_run, in_engine
from llamadiff.ext.file.against import compare_weights
from llamadiff.ext.file.original import faults_of
from llamadiff.ext.file.other_file import OtherFile
from llamadiff.ext.loss import words as said
from llamadiff.ext.loss.finding_out import Passed, loss_of
from llamadiff.ext.loss.result import Loss
from llamadiff.ext.loss.usual import file_type
from llamadiff.judge.run import run_passes
from llamadiff.judge.verdict import WRONG
from llamadiff.llamacpp.child import Child
from llamadiff.result.comparison import Comparison
from llamadiff.result.message import Message
from llamadiff.result.oddity import Oddity
from llamadiff.system.errors import UserError
from llamadiff.trace import taps
from llamadiff.trace.reader import Trace
from llamadiff.verbs.by_original import Original
from llamadiff.verbs.judging import judge

KEPT = "candidate.safetensors"  # the other file's run
TOKENS = "tokenizer.ggml.tokens"


def compare_files(
    model: str | Path, candidate: CandidateSpec | None, run: Run, how: How, folder: Path, child: Child
) -> Comparison:
    """Judge the other file's run by its own weights, its weights by the good file's, and measure what they cost.

    Both traces are written to ``folder``. Raises UserError for files of different models, and for whatever else a user
    can mend.
    """
    started = time.perf_counter()
    if Path(model).exists() and Path(str(candidate)).exists() and Path(model).samefile(str(candidate)):
        raise UserError(f"{candidate}: is the same file as {model}; give another .gguf of the model")
    kept = folder / KEPT
    if kept.exists() and not (folder / "baseline.safetensors").exists():  # with one, --force was given
        raise UserError(f"{kept}: is there already; give another directory")
    if run.settings.lora:
        raise UserError(f"lora={run.settings.lora}: two files are compared as they are; leave it out")
    good, bad = (ModelFile(path, settings=run.settings) for path in (model, str(candidate)))
    against = _same_model(good, bad)
    sides = _both_run(good, bad, run, how, folder, child)
    how.progress("comparing the weights")
    report = compare_weights(bad, against, how.progress)
    label = bad.path.name
    original = Original(sides.other, label, faults_of(report.findings, label))
    how = replace(how, partial=how.partial or run.is_partial)
    try:
        result = judge(sides.good, sides.baseline, sides.trace, how, original=original)
    except UserError:  # their taps have other shapes
        for fault in report.findings[:1]:
            raise UserError(f"{bad.path}: {fault.where}: {fault.says}; convert the wrong one again") from None
        raise
    result = replace(result, model=good.describe())
    if all(tap.name != taps.LOGITS for tap in sides.good.taps):
        return _of_vectors(result, bad, how, started)
    with_good_weights = run_passes(sides.good, sides.baseline, sides.trace, how).findings
    passed = Passed(with_good_weights, sides.good.weight_names, sides.baseline.info.tokens, run.settings)
    loss = loss_of(good, bad, passed, _damaged(report.findings, bad), how)
    result = replace(result, more={"loss": loss})
    return replace(_told(result, loss), timing={**result.timing, "loss_s": time.perf_counter() - started})


def _same_model(good: ModelFile, bad: ModelFile) -> OtherFile:
    """The good file as what the other one should be. Raises UserError for files of different models."""
    against = OtherFile(bad, good.path)
    ours, theirs = (file.weights.fields.get(TOKENS) for file in (bad, good))
    if isinstance(ours, list) and isinstance(theirs, list) and ours != theirs:
        raise UserError(
            f"{bad.path}: its vocabulary ({len(ours)} tokens) is not that of {good.path.name} ({len(theirs)}); "
            "give two files of one model"
        )
    for missing in (each for each in against.oddities() if each.cause == "missing" and each.certain):
        raise UserError(f"{bad.path}: {missing.where} {missing.says}; give two files of one model")
    for name in bad.tensors:
        if name in good.weights and good.weights.shape(name) != bad.weights.shape(name):
            shapes = [list(file.weights.shape(name)) for file in (bad, good)]
            raise UserError(
                f"{bad.path}: {name} has shape {shapes[0]}, in {good.path.name} {shapes[1]}; "
                "give two files of one model"
            )
    return against


@dataclass(frozen=True)
class _Runs:
    """Both files in engines, and what llama.cpp recorded of each."""

    good: Runnable
    baseline: Trace
    other: Runnable
    trace: Trace


def _both_run(good: ModelFile, bad: ModelFile, run: Run, how: How, folder: Path, child: Child) -> _Runs:
    """llama.cpp on both files, the other one on the good one's tokens, as it ran them."""
    engine, used = in_engine(good, how)
    with after_what_the_engine_said(good, used):
        request = request_for(engine or good, run, folder / "baseline.safetensors")
        opened, baseline = capture_run(engine, request, how.progress, child)
    how.progress(f"running llama.cpp on {bad.path.name}")
    tokens = replace(run, prompt=None, chat=False, tokens=baseline.info.tokens, n_predict=0)
    engine, used = in_engine(bad, how)
    with after_what_the_engine_said(bad, used):
        asked = request_for(engine or bad, tokens, folder / KEPT)
        other, trace = capture_run(engine, replace(asked, n_prefill=baseline.info.n_prefill), how.progress)
    named = {**trace.info.producer, "name": bad.path.name}
    info = replace(trace.info, producer=named, model={**trace.info.model, "sha256": None})
    return _Runs(opened, baseline, other, trace.under(info))


def _of_vectors(result: Comparison, bad: ModelFile, how: How, started: float) -> Comparison:
    """Of an encoder, which gives vectors and no logits: how far its last values are apart. Raises UserError where more
    was asked for.
    """
    if how.costing.text is not None or how.costing.spend:
        raise UserError(f"{bad.path}: {bad.architecture} is an encoder, without next tokens; leave out --text, --spend")
    last = next((row for row in reversed(result.rows) if row.drift is not None), None)
    line = said.of_vectors(file_type(bad), bad.architecture, last)
    told = (
        result.said.plus(line)
        if result.verdict == WRONG
        else Message(line, (result.said.headline, *result.said.clauses))
    )
    timing = {**result.timing, "loss_s": time.perf_counter() - started}
    return replace(result, headline=told.headline, proof=told.clauses, next_steps=(), timing=timing)


def _damaged(findings: Sequence[Oddity], bad: ModelFile) -> tuple[str, ...]:
    """The tensors that are not what their types explain."""
    return tuple(dict.fromkeys(each.where for each in findings if each.where in bad.weights))


def _told(result: Comparison, loss: Loss) -> Comparison:
    """The comparison under the sentence about its loss, unless an op is wrong, or what the files say of the model."""
    wrong = result.verdict == WRONG
    line, under, before = said.sentence(loss, not wrong), tuple(said.clauses(loss)), result.said
    other = any(row.verdict == WRONG for row in result.rows) or (wrong and not loss.damaged)
    if other:
        told = before.plus(line, *under)
    elif loss.damaged:  # what is wrong with the tensor says most
        told = Message(line, (before.headline, *under, *before.clauses))
    else:
        told = Message(line, (*under, before.headline, *before.clauses))
    steps = result.next_steps if wrong else ()  # what comes after the logits is no question here
    return replace(result, headline=told.headline, proof=told.clauses, next_steps=steps)
