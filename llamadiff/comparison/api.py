"""From a model and a prompt to a Comparison: capture, study, judge."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from llamadiff.candidates.name_map import Map, identity_map, load_map
from llamadiff.candidates.source import Context, Opened
from llamadiff.comparison import summary
from llamadiff.comparison.advice import next_steps
from llamadiff.comparison.backend import compare_nodes
from llamadiff.comparison.coverage import coverage_of
from llamadiff.comparison.drift_only import drift_only
from llamadiff.comparison.greedy import parting, with_parting
from llamadiff.comparison.result import (
    Comparison,
    Decoding,
    Logits,
    Row,
    arithmetics_of,
    compare_logits,
    leading,
    logit_rows,
    rows_of,
    with_explanations,
)
from llamadiff.diagnose.diagnosis import Diagnosis
from llamadiff.diagnose.diagnosis import diagnose as why
from llamadiff.engines.capture_request import request_for, text_request
from llamadiff.engines.graph_model import by_its_graph
from llamadiff.engines.model_file import Model, ModelFile, Runnable, check_same_model
from llamadiff.engines.select import GRAPH, EngineUsed, after_what_the_engine_said, in_engine, opened_for
from llamadiff.ggml.check import NodeCheck
from llamadiff.judge.misrecorded import misrecorded
from llamadiff.judge.run import Passes, run_passes, without_followers
from llamadiff.judge.statistics import statistics_check
from llamadiff.llamacpp.capture import capture, check_nodes, scratch_directory
from llamadiff.llamacpp.child import Child
from llamadiff.llamacpp.request import Request, Settings
from llamadiff.manner.understand import Manner, scene, understood
from llamadiff.numerics import tolerances
from llamadiff.preflight.checks import WEIGHTS, Check, preflight
from llamadiff.preflight.compatibility import check_runnable, check_same_run
from llamadiff.preflight.schedule import answers_otherwise, as_it_ran, as_stated, batches_of, in_batches_of
from llamadiff.preflight.shapes import admitted, misfit_checks, steps_when_misfit
from llamadiff.system.collisions import Named, refuse_collisions, saved
from llamadiff.system.errors import UserError
from llamadiff.system.output import made_directory
from llamadiff.system.progress import Progress, silent
from llamadiff.trace.reader import Info, Trace

LEAST_SECONDS = 10.0  # for the diagnosis of a small model


def compare(
    model: str | Path,
    prompt: str | None = None,
    *,
    tokens: Sequence[int] = (),
    chat: bool = False,
    n_predict: int = 0,
    candidate: Trace | str | Path | None = None,
    name_map: str | None = None,
    timeout: float = 600.0,
    patterns: Sequence[str] = (),
    layers: range | None = None,
    settings: Settings | None = None,
    rules: Sequence[tolerances.Rule] = tolerances.RULES,
    save: str | Path | None = None,
    partial: bool = False,
    precision: str = "f32",
    engine: str | None = None,
    diagnose: bool = True,
    explain: float = 0.0,
    progress: Progress = silent,
    child: Child | None = None,
    expect: Sequence[int] = (),
) -> Comparison:
    """Run llama.cpp and the engine on the same tokens, line up every tap, and judge.

    Without ``candidate`` the engine is it, and llama.cpp's own ops are judged; with one (a trace, or what
    ``--candidate`` takes: a file, a dump, a command), the candidate's are; its token ids serve where neither
    ``prompt`` nor ``tokens`` is given. ``name_map`` names or is a map of its tensors' names. ``save`` keeps the
    traces in a directory. ``partial``: what was recorded is enough, though the logits are not among it (so it is where
    ``patterns`` or ``layers`` ask for less). ``engine``: "numpy" or "graph", llama.cpp's graph node by node
    (default: the engine where it knows the architecture). ``diagnose``: look for the causes of what is wrong;
    ``explain``: for so many seconds, and through spans of any length, up to the whole model. ``child``: llama.cpp's
    process, if it was started before. ``expect``: tokens that the table of logits is to have. Raises UserError for
    whatever a user can mend.
    """
    started = time.perf_counter()
    settings = settings or Settings()
    refuse_collisions(compared_files(model, candidate, name_map), saved(save))
    with ExitStack() as stack:
        child = stack.enter_context(child or Child())  # gets ready while the model is opened
        brought, mapping = _opened(candidate) if candidate is not None else None, _map(name_map)
        file = ModelFile(model, precision, settings.threads)
        opened: Runnable | None
        opened, used = in_engine(file, engine, precision, settings.threads)
        if brought is not None and prompt is None and not tokens:
            tokens = _stated_tokens(brought)
        trace, facts = None, (mapping, timeout, progress)
        if brought is not None and brought.recorded and opened is not None and tokens and not n_predict:
            n_prefill = brought.run.n_prefill if brought.run is not None else len(tokens)
            trace = brought.load(Context(opened, tuple(tokens), n_prefill, *facts))  # what does not fit is said first
        folder = Path(stack.enter_context(scratch_directory() if save is None else made_directory(Path(save))))
        output = folder / "baseline.safetensors"
        keep = folder / "engine.safetensors" if save is not None else None
        if opened is None:
            stack.enter_context(after_what_the_engine_said(file, used))
            request = request_for(file, prompt, tokens, chat, n_predict, output, patterns, layers, settings)
            request = as_stated(request, brought.run if brought is not None else None)
            if candidate is None:
                result = _checked_graph(file, request, rules, progress, child)
                if keep is not None:
                    run_passes(*by_its_graph(model, request, progress), None, rules, keep, progress)
                return replace(result, engine=used)
        else:
            request = request_for(opened, prompt, tokens, chat, n_predict, output, patterns, layers, settings)
            request = as_stated(request, brought.run if brought is not None else None)
        opened, baseline = _captured(opened, request, progress, child)
        n_prompt = baseline.info.n_prefill
        if brought is not None:
            trace = trace or brought.load(Context(opened, baseline.info.tokens, n_prompt, *facts, baseline=baseline))
            again = as_it_ran(request, baseline.info, trace.info)
            if again is not None:
                opened, baseline = _captured(opened, again, progress)
        captured = time.perf_counter()
        less = partial or bool(patterns) or layers is not None
        result = judge(opened, baseline, trace, rules, keep, diagnose, explain, progress, less, expect)
        if trace is not None:
            ran, text_of = trace.info.tokens, opened.vocabulary.text
            result = with_parting(result, parting(baseline, trace, n_prompt, ran, n_predict > 0, text_of))
    timing = {"capture_s": captured - started, **result.timing, "total_s": time.perf_counter() - started}
    return replace(result, engine=used, timing={**timing, "peak_rss_mb": peak_rss_mb()})


def _captured(
    opened: Runnable | None, request: Request, progress: Progress, child: Child | None = None
) -> tuple[Runnable, Trace]:
    """llama.cpp's run, and what goes through it again: the engine, or else llama.cpp's own graph."""
    if not isinstance(opened, Model):
        return by_its_graph(request.model, request, progress, child)
    with opened.dequantizer.checking_ahead():
        return opened, capture(request, progress, child)


def graph(
    model: str | Path,
    prompt: str | None = None,
    *,
    tokens: Sequence[int] = (),
    chat: bool = False,
    n_predict: int = 0,
    settings: Settings | None = None,
    rules: Sequence[tolerances.Rule] = tolerances.RULES,
    keep: str | Path | None = None,
    progress: Progress = silent,
) -> Comparison:
    """Run llama.cpp and compute every node of its graph again, on the inputs it was given: any architecture.

    ``keep``: a directory for the wrong ops, each in a file. Raises UserError for whatever a user can mend.
    """
    with Child() as child:
        file = ModelFile(model)
        request = text_request(file, prompt, tokens, chat, n_predict, Path(), settings)
        with made_directory(Path(keep)) if keep is not None else nullcontext(None) as folder:
            return _checked_graph(file, replace(request, keep=folder), rules, progress, child)


def _checked_graph(
    file: ModelFile, request: Request, rules: Sequence[tolerances.Rule], progress: Progress, child: Child
) -> Comparison:
    """Every node that a request asks for, computed again."""
    with scratch_directory() as folder:
        request = replace(request, output=str(Path(folder) / "nodes.json"))
        result = compare_nodes(file, request, rules, progress, child)
    return replace(result, engine=EngineUsed(GRAPH), timing={**result.timing, "peak_rss_mb": peak_rss_mb()})


def record(
    model: str | Path,
    output: Path,
    prompt: str | None = None,
    *,
    tokens: Sequence[int] = (),
    chat: bool = False,
    n_predict: int = 0,
    patterns: Sequence[str] = (),
    layers: range | None = None,
    settings: Settings | None = None,
    progress: Progress = silent,
) -> Trace:
    """llama.cpp alone, kept as a trace. Raises UserError for whatever a user can mend."""
    refuse_collisions([("the model", model)], [("--output", output)])
    with Child() as child:
        file = ModelFile(model)
        opened, used = in_engine(file, None, "f32", 0)
        words = prompt, tokens, chat, n_predict, output, patterns, layers, settings
        if opened is not None:
            return capture(request_for(opened, *words), progress, child)
        with after_what_the_engine_said(file, used):
            return by_its_graph(model, request_for(file, *words), progress, child)[1]


def list_nodes(model: str | Path, n_tokens: int) -> tuple[NodeCheck, ...]:
    """The nodes of llama.cpp's graph for a prompt of so many tokens; nothing is computed again."""
    file = ModelFile(model)
    with scratch_directory() as folder:
        request = text_request(file, None, [0] * n_tokens, False, 0, Path(folder) / "nodes.json", Settings())
        return check_nodes(replace(request, nodes=True, only_list=True)).checks


def compared_files(
    model: str | Path, candidate: Trace | str | Path | None = None, name_map: str | None = None
) -> Iterator[Named]:
    """The files that a comparison reads. Raises UserError for a candidate that is nothing."""
    yield "the model", model
    if name_map is not None and Path(name_map).is_file():
        yield "the name map", name_map
    if isinstance(candidate, Trace):
        yield "the candidate", candidate.path
    elif candidate is not None:
        from llamadiff.candidates import files_of

        yield from (("a file of the candidate" if str(path) != str(candidate) else "the candidate", path)
                    for path in files_of(str(candidate)))  # fmt: skip


def _opened(candidate: Trace | str | Path) -> Opened:
    """A candidate, read before anything is run."""
    from llamadiff.candidates import open_candidate
    from llamadiff.candidates.trace_file import mapped

    if isinstance(candidate, Trace):
        return Opened(lambda context: mapped(candidate, context), candidate.info.tokens, run=candidate.info)
    return open_candidate(str(candidate))


def _stated_tokens(candidate: Opened) -> tuple[int, ...]:
    """The token ids that a candidate states. Raises UserError if it could have, and does not."""
    if candidate.untold and not candidate.tokens:
        raise UserError(f"{candidate.untold}; or give the prompt that was run, or --tokens 1,2,3")
    return candidate.tokens


def _map(name_map: str | None) -> Map:
    return load_map(name_map) if name_map is not None else identity_map()


def check(
    trace: str | Path | Trace,
    model: str | Path,
    rules: Sequence[tolerances.Rule] = tolerances.RULES,
    partial: bool = False,
) -> Comparison:
    """Judge a recorded llama.cpp trace with the engine; needs no llama.cpp where the engine runs the file."""
    started = time.perf_counter()
    baseline = Trace.open(trace) if isinstance(trace, (str, Path)) else trace
    opened, used = opened_for(model, baseline, str(baseline.path or "the trace"))
    result = judge(opened, baseline, None, rules, partial=partial)
    timing = {"capture_s": 0.0, **result.timing, "total_s": time.perf_counter() - started}
    return replace(result, engine=used, timing={**timing, "peak_rss_mb": peak_rss_mb()})


def diff(
    baseline: str | Path | Trace,
    candidate: str | Path | Trace,
    model: str | Path | None = None,
    rules: Sequence[tolerances.Rule] = tolerances.RULES,
    diagnose: bool = True,
    explain: float = 0.0,
    progress: Progress = silent,
    partial: bool = False,
    expect: Sequence[int] = (),
) -> Comparison:
    """Two traces: drift alone, or with the model also the local errors of both.

    ``partial``: what the candidate recorded is enough, though the logits are not among it.
    ``expect``: tokens that the table of logits is to have.
    """
    started = time.perf_counter()
    b, c = (Trace.open(side) if isinstance(side, (str, Path)) else side for side in (baseline, candidate))
    if model is not None:
        n_prompt, parted = b.info.n_prefill, answers_otherwise(b.info, c.info)
        b = _run_again(model, b, c.info, progress) if parted else b
        opened, used = opened_for(model, b, "the baseline", progress)
        result = replace(judge(opened, b, c, rules, None, diagnose, explain, progress, partial, expect), engine=used)
        found = parting(b, c, n_prompt, c.info.tokens, parted, opened.vocabulary.text)
        result = with_parting(result, found)
    else:
        check_same_run(b, c)
        result = drift_only(b, c, rules, partial, expect)
    timing = {"capture_s": 0.0, **result.timing, "total_s": time.perf_counter() - started}
    return replace(result, timing={**timing, "peak_rss_mb": peak_rss_mb()})


def _run_again(model: str | Path, baseline: Trace, candidate: Info, progress: Progress) -> Trace:
    """llama.cpp's run of what a candidate ran after the baseline's prompt; the baseline itself, if it is not its."""
    producer = baseline.info.producer
    if producer.get("name") != "llama.cpp":
        return baseline
    file = ModelFile(model)
    check_same_model(baseline.info.model, file.sha256, "the baseline")
    opened, _ = in_engine(file, None, "f32", 0)
    with scratch_directory() as folder:
        words = (candidate.tokens, False, 0, Path(folder) / "baseline.safetensors", (), None)
        request = request_for(opened or file, None, *words, Settings.stated(producer.get("settings")))
        n = baseline.info.n_prefill
        stated = candidate if len(candidate.edges) > 2 else replace(candidate, n_prefill=n)
        return _captured(opened, as_stated(request, stated), progress)[1]


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


def peak_rss_mb() -> float:
    """The larger peak of this process and its children, in MiB (memory-mapped model pages count)."""
    unit = 1 << 20 if sys.platform == "darwin" else 1 << 10
    peaks = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return max(peaks) / unit
