"""From judged passes to a Comparison: the one place that makes it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from llamadiff.comparison import summary
from llamadiff.comparison.advice import next_steps
from llamadiff.comparison.coverage import coverage_of
from llamadiff.comparison.logits import Logits, compare_logits, logit_rows
from llamadiff.comparison.result import Comparison, Decoding, arithmetics_of
from llamadiff.comparison.rows import Row, leading, rows_of, with_explanations
from llamadiff.diagnose.diagnosis import Diagnosis
from llamadiff.diagnose.diagnosis import diagnose as why
from llamadiff.engines.model_file import Runnable, check_same_model
from llamadiff.engines.reference_model import Model
from llamadiff.judge.misrecorded import misrecorded
from llamadiff.judge.run import Passes, run_passes, without_followers
from llamadiff.judge.statistics import statistics_check
from llamadiff.manner.understand import Manner, scene, understood
from llamadiff.numerics import tolerances
from llamadiff.preflight.checks import WEIGHTS, Check, preflight
from llamadiff.preflight.compatibility import check_runnable, check_same_run
from llamadiff.preflight.schedule import batches_of, in_batches_of
from llamadiff.preflight.shapes import admitted, misfit_checks, steps_when_misfit
from llamadiff.system.progress import Progress, silent
from llamadiff.trace.reader import Trace

LEAST_SECONDS = 10.0  # for the diagnosis of a small model


@np.errstate(all="ignore")  # what overflows shows in the values
def judge(
    model: Runnable,
    baseline: Trace,
    candidate: Trace | None,
    rules: Sequence[tolerances.Rule],
    keep: Path | None = None,
    diagnose: bool = True,
    explain: float = 0.0,
    progress: Progress = silent,
    partial: bool = False,
    expect: Sequence[int] = (),
) -> Comparison:
    """One engine pass over the baseline's tokens, and the Comparison it yields."""
    check_runnable(model, baseline, "the baseline")
    baseline = in_batches_of(baseline, candidate)
    if candidate is not None:
        check_runnable(model, candidate, "the candidate")
        check_same_run(baseline, candidate, model)
        check_same_model(candidate.info.model, str(baseline.info.model.get("sha256", model.sha256)), "the candidate")
    checks, fitting = tuple[Check, ...](), tuple[str, ...]()
    if candidate is not None:
        n_tokens = len(baseline.info.tokens)
        candidate, misfits = admitted(model, baseline, candidate)
        checks = (*preflight(model, baseline, candidate), *misfit_checks(model, misfits, n_tokens))
        fitting = steps_when_misfit(misfits, n_tokens)
    started = time.perf_counter()
    passes = run_passes(model, baseline, candidate, rules, keep, progress)
    under_test, manner, records = "baseline" if candidate is None else "candidate", Manner(), tuple[str, ...]()
    if candidate is not None and isinstance(model, Model):
        manner, candidate, passes = understood(model, baseline, candidate, passes, rules, progress)
        records, passes = misrecorded(model, baseline, candidate, passes, rules, progress)
    if candidate is not None:
        passes = without_followers(passes)
    stated, between = statistics_check(passes.findings)
    checks = (*checks, *stated)
    ran = time.perf_counter()
    seconds = explain or max(LEAST_SECONDS, 1.5 * (ran - started))  # about as long as finding out what is wrong took
    diagnosis: tuple[Diagnosis, ...] = ()
    if diagnose:
        computed = replace(passes, findings=[f for f in passes.findings if f.tap.name not in records])
        diagnosis = _diagnosed(model, computed, under_test, seconds, explain > 0, progress)
    found = rows_of(passes.findings, model.weight_names, model.weight_types, under_test, records)
    rows = with_explanations(found, diagnosis)
    weights_alone = not rows and any(check.name.startswith(WEIGHTS) for check in checks)
    of_taps = [] if weights_alone else [tolerances.worst_of([row.verdict for row in rows])]
    verdict = tolerances.worst_of([*of_taps, *(check.verdict for check in checks)])
    other = candidate.info.producer if candidate is not None else model.producer
    producer, named = {"name": "the candidate", **other}, {"name": "the baseline", **baseline.info.producer}
    trace = candidate if candidate is not None else baseline
    read = set(baseline.info.producer.get("weights_read", model.weights.read)) & set(model.tensors)
    unread = tuple(sorted(model.weights.read - read))
    wanted, extra = [tap.name for tap in model.taps if not tap.kind.optional], _extra(model, candidate)
    missing = tuple(name for name in wanted if name not in trace)
    coverage = coverage_of(rows, missing, trace, wanted, extra, partial)
    verdict = coverage.gated(verdict)
    has_graph = candidate is not None and isinstance(model, Model)
    steps = next_steps(verdict, rows, missing, candidate is None, diagnosis, has_graph, coverage, between)
    return Comparison(
        verdict=verdict,
        summary=summary.summarize(
            verdict,
            rows,
            producer,
            named,
            candidate is None,
            unread,
            checks,
            baseline.info,
            missing,
            diagnosis,
            coverage,
            manner,
            () if candidate is None else candidate.printed.notes,
        ),
        rows=rows,
        missing=missing,
        model=model.describe(baseline.info.model.get("sha256")),
        tokens=model.token_texts(baseline.info.tokens),
        n_prefill=baseline.info.n_prefill,
        batches=batches_of(baseline.info),
        prompt=baseline.info.prompt,
        baseline=named,
        candidate=producer,
        logits=_logits(baseline, candidate, passes.logits, model, expect),
        only_baseline_read=tuple(sorted(read - model.weights.read)),
        only_engine_read=unread,
        timing={"engine_s": ran - started, "compare_s": time.perf_counter() - ran},
        next_steps=(*fitting, *(steps if rows or not fitting else ())),
        preflight=checks,
        arithmetics=arithmetics_of(rows),
        extra=extra,
        coverage=coverage,
        profile=_described(rows, diagnosis),
        diagnosis=diagnosis,
        manner=manner,
        free_tokens=passes.free_tokens,
        decoding=Decoding(len(model.dequantizer.trusted), tuple(sorted(model.dequantizer.refused))),
    )


def _diagnosed(
    model: Runnable, passes: Passes, under_test: str, seconds: float, thorough: bool, progress: Progress
) -> tuple[Diagnosis, ...]:
    """The causes of what is wrong."""
    with threadpool_limits(1, "blas"):
        return why(scene(model, passes, under_test, seconds, thorough, progress), passes.findings)


def _extra(model: Runnable, candidate: Trace | None) -> tuple[str, ...]:
    """Names of the candidate that stand for nothing: its own, and those that a name map left over."""
    if candidate is None:
        return ()
    present, left = {tap.name for tap in model.taps}, candidate.info.producer.get("extra")
    own = [name for name in candidate if name not in present and not name.startswith(WEIGHTS)]
    return (*own, *map(str, left)) if isinstance(left, list) else tuple(own)


def _described(rows: Sequence[Row], diagnosis: Sequence[Diagnosis]) -> tuple[str, ...]:
    """What the leading error looks like."""
    first = leading([row for row in rows if row.verdict == tolerances.WRONG], diagnosis)
    return tuple(fact.says for fact in first.local.facts) if first is not None and first.local is not None else ()


def _logits(
    baseline: Trace, candidate: Trace | None, engine: Any, model: Runnable, expect: Sequence[int]
) -> Logits | None:
    name = "result_output"
    if name not in baseline or (candidate is not None and name not in candidate):
        return None
    if candidate is None:
        free = logit_rows(engine)
        return compare_logits(logit_rows(baseline[name])[: len(free)], free, model.vocabulary.text, None, expect)
    mask = candidate.known.get(name)
    if mask is not None and not mask[-1].any():
        return None
    known = None if mask is None else logit_rows(mask)
    return compare_logits(logit_rows(baseline[name]), logit_rows(candidate[name]), model.vocabulary.text, known, expect)
