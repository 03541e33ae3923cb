"""What llamadiff does, from a model and a Run to a Comparison: compare, check, diff; and record, to a trace.

``compare``, ``check`` and ``diff`` are the Python API.

What judges is imported where it is used: the commands start sooner, and llama.cpp runs meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from llamadiff import plugins
from llamadiff.candidates.opening import Candidate, CandidateSpec, files_of, read_candidate
from llamadiff.engines.batches import answers_otherwise, as_it_ran, as_stated
from llamadiff.engines.capture_request import request_for, text_request
from llamadiff.engines.model_file import ModelFile, Runnable, adapter_settings, check_same_model
from llamadiff.engines.own_graph import needed_graph, own_graph
from llamadiff.engines.run_spec import USUAL, How, Run
from llamadiff.engines.select import after_what_the_engine_said, capture_run, in_engine, opened_for, stream_run
from llamadiff.judge.preflight.checks import check_same_run, tokens_apart
from llamadiff.judge.sketching import sketch_of
from llamadiff.judge.verdict import is_right
from llamadiff.llamacpp.capture import scratch_directory
from llamadiff.llamacpp.child import Child
from llamadiff.llamacpp.request import Request, Settings
from llamadiff.system.collisions import Named, refuse_collisions, saved_files
from llamadiff.system.errors import UserError
from llamadiff.system.output import check_target, made_directory
from llamadiff.system.progress import Progress
from llamadiff.system.python_child import peak_rss_mb
from llamadiff.trace.metadata import CHECKED, Info
from llamadiff.trace.reader import Trace
from llamadiff.trace.sketch import write_sketch
from llamadiff.trace.writer import restate

if TYPE_CHECKING:
    from llamadiff.result.comparison import Comparison
    from llamadiff.verbs.by_original import Original
    from llamadiff.verbs.judging import Graph


class Compare(Protocol):
    """What compares a model with a candidate that is no trace; it writes to the folder.

    Raises UserError for whatever a user can mend.
    """

    def __call__(
        self, model: str | Path, candidate: CandidateSpec | None, run: Run, how: How, folder: Path, child: Child
    ) -> Comparison: ...


COMPARED = ("type_k", "type_v", "flash_attn", "lora_sha256", "lora_scale")  # settings that change what is computed


def compare(
    model: str | Path,
    prompt: str | Sequence[int] | Run | None = None,
    candidate: CandidateSpec | None = None,
    how: How = USUAL,
    save: str | Path | None = None,
    child: Child | None = None,
) -> Comparison:
    """Run llama.cpp and the engine on the same tokens, line up every tap, and judge.

    ``prompt``: text, token ids, or a Run that says more. Without ``candidate`` the engine is it, and llama.cpp's own
    ops are judged; with one (a trace; what ``--candidate`` takes: a file, a dump, a command; or a function of the token
    ids that returns arrays by the names of taps), the candidate's are; its token ids serve where there is no prompt.
    ``how`` it is judged. ``save`` keeps the traces in a directory. ``child``: llama.cpp's process, if it was started
    before. Raises UserError for whatever a user can mend.
    """
    started, run = time.perf_counter(), run_of(prompt)
    refuse_collisions(compared_files(model, candidate, how.name_map), saved_files(save))
    other = plugins.ask_first(lambda each: each.comparison_of(candidate, how, run))
    if other is not None:
        with child or Child(run.settings) as ready, _workplace(save) as folder:
            result = other(model, candidate, run, how, Path(folder), ready)
            return _add_timing(_with_concerns(result, ModelFile(model)), started)
    with child or Child(run.settings) as ready:  # gets ready while the model is opened
        ready.meanwhile.append(_get_ready_to_judge)
        ready.ahead(Request(str(model), settings=run.settings))
        brought = read_candidate(candidate, how, run.settings.place)
        file = ModelFile(model, how.precision, run.settings)
        engine, used = in_engine(file, how)
        run = brought.tokens_for(run) if brought is not None else run
        brought = brought.ahead(engine, run) if brought is not None and engine is not None else brought
        with _workplace(save) as folder, after_what_the_engine_said(file, used):
            request = request_for(engine or file, run, Path(folder) / "baseline.safetensors")
            keep = Path(folder) / "engine.safetensors" if save is not None else None
            if engine is None and brought is None:
                result = _graph_alone(file, request, how, ready, keep)
            else:
                how = replace(how, partial=how.partial or run.is_partial)
                result = _judged_run(engine, request, brought, how, ready, keep, started)
    return _add_timing(_with_concerns(replace(result, engine=used), file), started)


def _with_concerns(result: Comparison, file: ModelFile) -> Comparison:
    """With what is odd about the file, before what to do where all is right, else after it."""
    said = [check.name.rpartition(" ")[2] for check in result.preflight if not is_right(check.verdict)]
    lines = (line for lines in plugins.ask_all(lambda each: each.concerns(file)) for line in lines)
    found = tuple(line for line in lines if not any(f": {place}: " in line for place in said))
    steps = (*found, *result.next_steps) if is_right(result.verdict) else (*result.next_steps, *found)
    return replace(result, next_steps=steps)


def _judged_run(
    engine: Runnable | None, request: Request, brought: Candidate | None, how: How, child: Child, keep: Path | None,
    started: float,
) -> Comparison:  # fmt: skip
    """llama.cpp's run, judged while it goes on, with the candidate or alone.

    ``engine``: None for a graph that llama.cpp records. ``keep``: a trace file for the engine's own run.
    """
    n_predict, place = request.n_predict, request.settings.place
    request = as_stated(request, brought.source.run if brought is not None else None)
    with stream_run(engine, request, how.progress, child) as ran:
        model, baseline = ran
        n_prompt, trace = baseline.info.n_prefill, None
        if brought is not None:
            trace = brought.load_trace(model, baseline)
            model, baseline = _rerun_with_candidate_batches(trace, model, baseline, request, how.progress)
            if brought.source.recorded and trace.info.tokens != baseline.info.tokens:
                parted = tokens_apart(model, baseline.info.tokens, trace.info.tokens)
                raise UserError(f"{parted}; to run those that {brought.spec} states, leave out the prompt or --tokens")
        capture_s = time.perf_counter() - started
        from llamadiff.verbs.greedy import find_parting, with_parting
        from llamadiff.verbs.judging import judge

        original = _original_behind(brought, model, how.progress)
        graph = _graph_behind(model, baseline, how.progress, place, child)
        result = judge(model, baseline, trace, how, keep, original, graph)
        result = replace(result, timing={"capture_s": capture_s, **result.timing})
        if brought is None or trace is None:
            return result
        if (request.patterns or request.layers) and len(result.rows) > len(request.wanted or result.rows):
            note = f"--only limits what llama.cpp records; all {len(result.rows)} taps of {brought.spec} were judged"
            result = replace(result, next_steps=(*result.next_steps, note))
        return with_parting(result, find_parting(baseline, trace, n_prompt, n_predict > 0, model.vocabulary.text))


def _graph_behind(
    model: Runnable, baseline: Trace, progress: Progress, place: Settings | None = None, child: Child | None = None
) -> Graph | None:
    """What makes llama.cpp's graph of a run, which another engine is judged by."""
    graph = None if model.by_graph else own_graph()
    return None if graph is None else partial(graph.of_run, model, baseline, progress, place, child)


def _original_behind(brought: Candidate | None, model: Runnable, progress: Progress) -> Original | None:
    """The checkpoint that a candidate runs, where that can stand in for the file."""
    return None if brought is None else plugins.ask_first(lambda each: each.original(brought.spec, model, progress))


def run_of(prompt: str | Sequence[int] | Run | None) -> Run:
    """What is run: text, token ids, or a Run as it is."""
    if isinstance(prompt, Run):
        return prompt
    return Run(prompt) if prompt is None or isinstance(prompt, str) else Run(tokens=prompt)


def _get_ready_to_judge() -> None:
    """Import what takes as long to import as llama.cpp takes for a short prompt."""
    import llamadiff.verbs.judging  # noqa: F401


def _workplace(save: str | Path | None) -> AbstractContextManager[str | Path]:
    """Where traces are written: what is kept, or gone at the end."""
    return scratch_directory() if save is None else made_directory(Path(save))


def _rerun_with_candidate_batches(
    trace: Trace, engine: Runnable, baseline: Trace, request: Request, progress: Progress
) -> tuple[Runnable, Trace]:
    """llama.cpp's run as the candidate's was, where that is another one: then it is run again."""
    again = as_it_ran(request, baseline.info, trace.info)
    if again is None:
        return engine, baseline
    baseline.wait()  # its file is written once more
    return capture_run(engine, again, progress)


def _graph_alone(file: ModelFile, request: Request, how: How, child: Child, keep: Path | None) -> Comparison:
    """llama.cpp's graph, node by node; ``keep``: a trace file for what NumPy makes of it."""
    result = needed_graph("this model").judge_nodes(file, request, how, child)
    if keep is not None:
        from llamadiff.judge.run import run_passes

        opened, baseline = capture_run(None, request, how.progress)
        run_passes(opened, baseline, None, how, keep)
    return result


def _add_timing(result: Comparison, started: float) -> Comparison:
    """A comparison that says how long all took."""
    timing = {"capture_s": 0.0, **result.timing, "total_s": time.perf_counter() - started}
    return replace(result, timing={**timing, "peak_rss_mb": peak_rss_mb()})


def check(
    trace: str | Path | Trace,
    model: str | Path,
    how: How = USUAL,
    candidate: CandidateSpec | None = None,
    threads: int = 0,
) -> Comparison:
    """Judge a recorded llama.cpp trace with the engine, or a candidate that runs the trace's tokens.

    Needs no llama.cpp where the engine runs the file. Raises UserError, also for a candidate that states other settings
    than the trace's.
    """
    from llamadiff.verbs.judging import judge

    started = time.perf_counter()
    baseline, brought = _open_trace(trace), read_candidate(candidate, how)
    opened, used = opened_for(model, baseline, str(baseline.path or "the trace"), threads=threads)
    own = brought.load_trace(opened, baseline) if brought is not None else None
    if own is not None:
        _refuse_other_settings(baseline.info, own.info)
    graph = _graph_behind(opened, baseline, how.progress)
    return _add_timing(replace(judge(opened, baseline, own, how, graph=graph), engine=used), started)


def diff(
    baseline: str | Path | Trace, candidate: str | Path | Trace, model: str | Path | None = None, how: How = USUAL
) -> Comparison:
    """Two traces: drift alone, or with the model also the local errors of both."""
    started = time.perf_counter()
    b, c = _named_apart(_open_trace(baseline), _open_trace(candidate))
    if c.sketch is not None:
        raise UserError(f"{c.path}: is a sketch, which keeps no tensors; give it as the baseline")
    if model is not None:
        return _add_timing(_judged_by(model, b, c, how), started)
    check_same_run(b, c)
    from llamadiff.verbs.drift_only import drift_only

    return _add_timing(drift_only(b, c, how), started)


def _named_apart(b: Trace, c: Trace) -> tuple[Trace, Trace]:
    """Two traces, by their files' names where both state one name; llama.cpp's keep it, since it says how it adds."""
    stated, files = b.info.producer.get("name"), [each.path.stem if each.path else "" for each in (b, c)]
    if stated in (None, "llama.cpp") or stated != c.info.producer.get("name") or not all(files) or files[0] == files[1]:
        return b, c
    infos = [replace(t.info, producer={**t.info.producer, "name": file}) for t, file in zip((b, c), files, strict=True)]
    return b.saying(infos[0]), c.saying(infos[1])


def _open_trace(trace: str | Path | Trace) -> Trace:
    return trace if isinstance(trace, Trace) else Trace.open(trace)


def _judged_by(model: str | Path, baseline: Trace, candidate: Trace, how: How) -> Comparison:
    """Two traces, judged with the model; llama.cpp runs again what the candidate generated otherwise."""
    from llamadiff.verbs.greedy import find_parting, with_parting
    from llamadiff.verbs.judging import judge

    n_prompt, parted = baseline.info.n_prefill, answers_otherwise(baseline.info, candidate.info)
    if parted:
        baseline = _rerun_on_candidate_tokens(model, baseline, candidate.info, how.progress)
    opened, used = opened_for(model, baseline, "the baseline", how.progress)
    graph = _graph_behind(opened, baseline, how.progress)
    result = replace(judge(opened, baseline, candidate, how, graph=graph), engine=used)
    return with_parting(result, find_parting(baseline, candidate, n_prompt, parted, opened.vocabulary.text))


def _rerun_on_candidate_tokens(model: str | Path, baseline: Trace, candidate: Info, progress: Progress) -> Trace:
    """llama.cpp's run of what a candidate ran after the baseline's prompt; the baseline itself, if it is not its."""
    producer = baseline.info.producer
    if producer.get("name") != "llama.cpp":
        return baseline
    file = ModelFile(model, settings=adapter_settings(baseline, model, Settings.from_stated(producer.get("settings"))))
    check_same_model(baseline.info.model, file.sha256, "the baseline", file.path)
    engine, _ = in_engine(file)
    with scratch_directory() as folder:
        run = Run(tokens=candidate.tokens, settings=file.settings)
        request = request_for(engine or file, run, Path(folder) / "baseline.safetensors")
        n = baseline.info.n_prefill
        stated = candidate if len(candidate.edges) > 2 else replace(candidate, n_prefill=n)
        return capture_run(engine, as_stated(request, stated), progress)[1]


def record_nodes(model: str | Path, run: Run, output: Path, how: How = USUAL) -> int:
    """Every node of llama.cpp's run with its inputs, in a file that is judged elsewhere -> how many there are.

    Raises UserError for whatever a user can mend.
    """
    refuse_collisions([("the model", model)], [("--output", output)])
    request = replace(text_request(ModelFile(model), run, output), nodes=True)
    return needed_graph("--nodes").record_nodes(request, how.progress)


def record(
    model: str | Path, run: Run, output: Path, how: How = USUAL, sketch: bool = False, prompt: str | None = None
) -> Trace:
    """llama.cpp's run, judged and kept as a trace that says so, or as a ``sketch`` of it.

    ``prompt``: the text that a run of token ids is of. Raises UserError for whatever a user can mend.
    """
    refuse_collisions([("the model", model)], [("--output", output)])
    check_target(output)
    with Child(run.settings) as child, scratch_directory() if sketch else nullcontext() as folder:
        child.meanwhile.append(_get_ready_to_judge)
        place = output if folder is None else Path(folder) / "trace.safetensors"
        file = ModelFile(model, settings=run.settings)
        engine, used = in_engine(file)
        request = replace(request_for(engine or file, run, place), keep_graph=own_graph() is not None)
        with after_what_the_engine_said(file, used) if engine is None else nullcontext():
            opened, trace = capture_run(engine, request, how.progress, child)
        from llamadiff.verbs.judging import judge

        judged = replace(judge(opened, trace, None, replace(how, diagnose=False)), engine=used)
        producer = {**trace.info.producer, CHECKED: _checked_by(judged)}
        info = replace(trace.info, producer=producer, prompt=trace.info.prompt or prompt)
        if sketch:
            keep_sketch(output, info, trace)
        else:
            restate(output, info)
    return Trace.open(output)


def keep_sketch(output: Path, info: Info, values: Mapping[str, Any]) -> None:
    """Write a sketch of a run's taps in place of their values."""
    write_sketch(output, info, sketch_of(values))


def compared_files(
    model: str | Path | None, candidate: CandidateSpec | None = None, name_map: str | None = None
) -> Iterator[Named]:
    """The files that a comparison reads. Raises UserError for a candidate that is nothing."""
    yield "the model", model
    if name_map is not None and Path(name_map).is_file():
        yield "the name map", name_map
    if isinstance(candidate, Trace):
        yield "the candidate", candidate.path
    elif candidate is not None and not callable(candidate):
        yield from (("a file of the candidate" if str(path) != str(candidate) else "the candidate", path)
                    for path in files_of(str(candidate)))  # fmt: skip


def _checked_by(result: Comparison) -> dict[str, Any]:
    """What a capture says of who checked it."""
    engine = result.engine.name if result.engine is not None else "numpy"
    version = import_module("llamadiff").__version__  # an import would go in a circle: that is the face of all
    return {"engine": engine, "llamadiff": version, "verdict": result.verdict, "taps": len(result.rows)}


def _refuse_other_settings(recorded: Info, candidate: Info) -> None:
    """Raise UserError, with both values, for a candidate that states settings other than those of the recording."""
    theirs, own = (_settings(info) for info in (recorded, candidate))
    for name in COMPARED:
        if name in theirs and name in own and _same(theirs[name]) != _same(own[name]):
            raise UserError(
                f"the candidate was run with {name} = {str(own[name])[:40]}, "
                f"the recording with {str(theirs[name])[:40]}; run it with the same, or record anew"
            )


def _same(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


def _settings(info: Info) -> Mapping[str, Any]:
    settings = info.producer.get("settings")
    return settings if isinstance(settings, Mapping) else {}
