"""Traces of one run, judged with the model: passes of the engine, causes, and the Comparison that they yield."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff import plugins
from llamadiff.candidates.source import FOUND_MAP
from llamadiff.engines.batches import batches_of, in_batches_of
from llamadiff.engines.model_file import Runnable, check_same_model
from llamadiff.engines.run_spec import Gate, How
from llamadiff.judge.preflight.checks import RECORDING, Check, check_runnable, check_same_run, given_rightly, preflight
from llamadiff.judge.preflight.shapes import drop_misshapen, misfit_checks, steps_when_misfit
from llamadiff.judge.run import Passes, run_passes
from llamadiff.judge.statistics import statistics_check
from llamadiff.judge.study import Bench, Study, infer_conventions
from llamadiff.judge.verdict import WRONG, Ruling, of_run, of_unjudged
from llamadiff.result.comparison import Comparison, Decoding, Judged, Sides, assemble
from llamadiff.result.coverage import coverage_of
from llamadiff.result.diagnosis import Diagnosis
from llamadiff.result.logits import Logits, compare_logits, logit_rows
from llamadiff.result.oddity import Oddity
from llamadiff.result.rows import Row, rows_of, with_explanations
from llamadiff.system.errors import UserError
from llamadiff.trace.reader import Trace
from llamadiff.trace.taps import LOGITS, WEIGHTS
from llamadiff.verbs.by_original import Original, by_the_original
from llamadiff.verbs.sketch_alone import note_on, sketch_alone
from llamadiff.words.advice import next_steps
from llamadiff.words.summary import summarize
from llamadiff.words.unjudged import has_open_places

Array = NDArray[Any]
Graph = Callable[[], Runnable | None]


@np.errstate(all="ignore")  # what overflows shows in the values
def judge(
    model: Runnable,
    baseline: Trace,
    candidate: Trace | None,
    how: How,
    keep: Path | None = None,
    original: Original | None = None,
    graph: Graph | None = None,
) -> Comparison:
    """Judge a candidate, or else the baseline itself. ``keep``: a trace file for the engine's own run.

    ``original``: the checkpoint whose weights the candidate multiplied by; it is judged by these, the file by them too.
    ``graph`` makes llama.cpp's graph of the run, where a cause is not found among the model's own ops.
    """
    some = plugins.ask_first(lambda each: each.some_rows(model, baseline, candidate))
    if some is not None:
        model, baseline, candidate = some.model, some.baseline, some.candidate
    baseline = _fit_to_compare(model, baseline, candidate)
    model = original.model if original is not None else model
    if candidate is None and baseline.sketch is not None:
        return sketch_alone(model, baseline, _sides(model, baseline, None), how)
    given = baseline if candidate is None else candidate
    candidate, checks, fitting = _before_the_layers(model, baseline, candidate)
    started = time.perf_counter()
    graph = cache(graph or (lambda: model if model.by_graph else None))
    bench = Bench(model, baseline, how, graph)
    study = _study_candidate(bench, candidate, keep)
    stated, between = statistics_check(study.passes.findings)
    ran = time.perf_counter()
    other = plugins.ask_first(lambda each: each.other_file(bench, study, given))
    searched = how.diagnose and other is None
    diagnosis = (plugins.ask_first(lambda each: each.causes(bench, study)) if searched else None) or ()
    checks = checks if other is None else (*checks, other)
    slips = [Check(RECORDING, of_unjudged(), slip) for slip in study.assumed.slips]
    judged = _summarize(model, baseline, study, (*checks, *slips, *stated), diagnosis, how)
    judged = replace(judged, timing={"engine_s": ran - started, "compare_s": time.perf_counter() - ran})
    judged = by_the_original(judged, original) if original is not None else judged
    sides, ruling = _sides(model, baseline, study.assumed.trace), _rule(judged)
    steps = next_steps(ruling.verdict, judged, sides.is_engine, between)
    steps = (*fitting, *(steps if judged.rows or not fitting else ()))
    result = assemble(sides, judged, ruling, summarize(ruling.verdict, sides, judged), steps)
    result = result if some is None else some.of_tokens(result)
    return result if how.gate is None else _hold_to_gate(result, bench, study, how.gate)


def _fit_to_compare(model: Runnable, baseline: Trace, candidate: Trace | None) -> Trace:
    """The baseline, in the candidate's batches. Raises UserError for traces that cannot be judged, or not together."""
    check_runnable(model, baseline, "the baseline")
    baseline = in_batches_of(baseline, candidate)
    if candidate is not None:
        check_runnable(model, candidate, "the candidate")
        check_same_run(baseline, candidate, model)
        check_same_model(candidate.info.model, str(baseline.info.model.get("sha256", model.sha256)), "the candidate")
    return baseline


def _before_the_layers(
    model: Runnable, baseline: Trace, candidate: Trace | None
) -> tuple[Trace | None, tuple[Check, ...], tuple[str, ...]]:
    """The candidate without the taps that do not fit, what was checked of it, and what to do about those."""
    given = given_rightly((baseline if candidate is None else candidate).info)
    if candidate is None:
        return None, given, ()
    n_tokens = len(baseline.info.tokens)
    candidate, misfits = drop_misshapen(model, baseline, candidate)
    checks = (*given, *preflight(model, baseline, candidate), *misfit_checks(model, misfits, n_tokens))
    return candidate, checks, steps_when_misfit(misfits, n_tokens)


def _study_candidate(bench: Bench, candidate: Trace | None, keep: Path | None) -> Study:
    """As many passes as it takes to tell what is a candidate's convention from what is wrong."""
    passes = run_passes(bench.model, bench.baseline, candidate, bench.how, keep)
    bench.baseline.wait()
    return infer_conventions(bench, candidate, passes)


def _hold_to_gate(result: Comparison, bench: Bench, study: Study, gate: Gate) -> Comparison:
    """The result, held to the limits of a gate by a slice. Raises UserError for limits that nobody holds it to."""
    held = plugins.ask_first(lambda each: each.hold_to_gate(result, bench, study, gate))
    if held is None and (gate.mean is not None or gate.p99 is not None):
        raise UserError("limits of the logits' KL: the slice that holds to them is missing; llamadiff doctor says why")
    return held or result


def _summarize(
    model: Runnable,
    baseline: Trace,
    study: Study,
    checks: tuple[Check, ...],
    diagnosis: tuple[Diagnosis, ...],
    how: How,
) -> Judged:
    """All that was found, tap by tap and as a whole."""
    passes, candidate = study.passes, study.assumed.trace
    found = rows_of(passes.findings, model.weight_names, model.weight_types, study.under_test, study.assumed.records)
    rows = with_explanations(found, diagnosis)
    trace = candidate if candidate is not None else baseline
    read = set(baseline.info.producer.get("weights_read", model.weights.read)) & set(model.tensors)
    wanted, extra = [tap.name for tap in model.taps if not tap.kind.optional], _extra(model, candidate)
    missing = tuple(name for name in wanted if name not in trace)
    return Judged(
        rows=rows,
        missing=missing,
        extra=extra,
        found_map=_found_map(candidate, how),
        coverage=coverage_of(rows, missing, trace, wanted, extra, how.partial),
        preflight=checks,
        diagnosis=diagnosis,
        manner=study.manner,
        notes=() if candidate is None else (*candidate.printed.notes, *note_on(baseline)),
        logits=_logits(model, baseline, candidate, passes.logits, how),
        only_baseline_read=tuple(sorted(read - model.weights.read)),
        only_engine_read=tuple(sorted(model.weights.read - read)),
        free_tokens=passes.free_tokens,
        decoding=Decoding(len(model.dequantizer.trusted), tuple(sorted(model.dequantizer.refused))),
        blamed=() if candidate is None else _blamed_taps(passes),
        origin=next((_origin(model, row) for row in rows if has_open_places(row)), None),
    )


def _origin(model: Runnable, row: Row) -> Oddity | None:
    """What of the file makes values that are not finite, at the first tap that cannot be judged for them."""
    return plugins.ask_first(lambda each: each.not_finite(model, row.weight, row.layer))


def _blamed_taps(passes: Passes) -> tuple[str, ...]:
    """The baseline's taps that are off on inputs which are all there: how much a span may err is not known of it."""
    found = ((finding.tap.name, finding.local.get("baseline")) for finding in passes.findings)
    return tuple(name for name, local in found if local and local.verdict == WRONG and not local.span)


def _rule(judged: Judged) -> Ruling:
    """The worst of the taps and the checks, as far as enough was judged. Weights may be all that there is to judge.

    Where the baseline is off on its own inputs, nothing was compared with what is right.
    """
    assert judged.coverage is not None
    weights_alone = not judged.rows and any(check.name.startswith(WEIGHTS) for check in judged.preflight)
    of_taps = [] if weights_alone else [row.verdict for row in judged.rows] or [of_unjudged()]
    checks = [check.verdict for check in judged.preflight]
    return of_run(of_taps, checks, judged.blamed, judged.coverage.is_enough)


def ruled_again(result: Comparison) -> Comparison:
    """A result whose rows, checks or causes are others now: its verdict by these, and what is said of it."""
    ruling = _rule(result)
    said, steps = summarize(ruling.verdict, result, result), next_steps(ruling.verdict, result, result.is_engine)
    return replace(result, reasons=(), next_steps=steps).overrule(ruling, said)


def _sides(model: Runnable, baseline: Trace, candidate: Trace | None) -> Sides:
    """Who was compared: the engine where there is no candidate."""
    info = baseline.info
    return Sides(
        model=model.describe(info.model.get("sha256")),
        tokens=model.token_texts(info.tokens),
        n_prefill=info.n_prefill,
        prompt=info.prompt,
        batches=batches_of(info),
        baseline={"name": "the baseline", **info.producer},
        candidate={"name": "the candidate", **(model.producer if candidate is None else candidate.info.producer)},
        is_engine=candidate is None,
    )


def _extra(model: Runnable, candidate: Trace | None) -> tuple[str, ...]:
    """Names of the candidate that stand for nothing: its own, and those that a name map left over."""
    if candidate is None:
        return ()
    present, left = {tap.name for tap in model.taps}, candidate.info.producer.get("extra")
    own = [name for name in candidate if name not in present and not name.startswith(WEIGHTS)]
    return (*own, *map(str, left)) if isinstance(left, list) else tuple(own)


def _found_map(candidate: Trace | None, how: How) -> tuple[str, ...]:
    """The lines of a map that was found by values, where one was asked for: a stranger's trace may state some too."""
    lines = candidate.info.producer.get(FOUND_MAP) if candidate is not None and how.name_map == "auto" else None
    return tuple(map(str, lines)) if isinstance(lines, list) else ()


def _logits(model: Runnable, baseline: Trace, candidate: Trace | None, engine: Array, how: How) -> Logits | None:
    """The table of logits, against the ``engine``'s where there is no candidate; None where they were not recorded."""
    if LOGITS not in baseline or (candidate is not None and LOGITS not in candidate):
        return None
    theirs, mask = logit_rows(baseline[LOGITS]), candidate.known.get(LOGITS) if candidate is not None else None
    own = logit_rows(engine if candidate is None else candidate[LOGITS])
    if candidate is None:
        theirs = theirs[: len(own)]
    if mask is not None and not mask[-1].any():
        return None
    known = None if mask is None else logit_rows(mask)
    expected = how.expected_of(theirs.shape[1])
    return compare_logits(theirs, own, model.vocabulary.text, known, expected, how.pictures)
