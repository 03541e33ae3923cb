"""From a model and a prompt to a Comparison: capture, study, judge."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path

from llamadiff.candidates.map_file import load_map
from llamadiff.candidates.name_map import Map, identity_map
from llamadiff.candidates.source import Context, Opened
from llamadiff.comparison.assemble import judge
from llamadiff.comparison.backend import compare_nodes
from llamadiff.comparison.drift_only import drift_only
from llamadiff.comparison.greedy import parting, with_parting
from llamadiff.comparison.result import Comparison
from llamadiff.engines.capture_request import request_for, text_request
from llamadiff.engines.graph_model import by_its_graph
from llamadiff.engines.model_file import ModelFile, Runnable, check_same_model
from llamadiff.engines.reference_model import Model
from llamadiff.engines.select import GRAPH, EngineUsed, after_what_the_engine_said, in_engine, opened_for
from llamadiff.ggml.check import NodeCheck
from llamadiff.judge.run import run_passes
from llamadiff.llamacpp.capture import capture, check_nodes, scratch_directory
from llamadiff.llamacpp.child import Child
from llamadiff.llamacpp.request import Request, Settings
from llamadiff.numerics import tolerances
from llamadiff.preflight.compatibility import check_same_run
from llamadiff.preflight.schedule import answers_otherwise, as_it_ran, as_stated
from llamadiff.system.collisions import Named, refuse_collisions, saved
from llamadiff.system.errors import UserError
from llamadiff.system.output import made_directory
from llamadiff.system.progress import Progress, silent
from llamadiff.system.timing import peak_rss_mb
from llamadiff.trace.metadata import Info
from llamadiff.trace.reader import Trace


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
        from llamadiff.candidates.opening import files_of

        yield from (("a file of the candidate" if str(path) != str(candidate) else "the candidate", path)
                    for path in files_of(str(candidate)))  # fmt: skip


def _opened(candidate: Trace | str | Path) -> Opened:
    """A candidate, read before anything is run."""
    from llamadiff.candidates.opening import open_candidate
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
