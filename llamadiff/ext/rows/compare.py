"""llama.cpp's run of a long prompt, of which some rows are judged, against a candidate's same rows or the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from llamadiff.candidates.command import PREFIX
from llamadiff.candidates.opening import Candidate, CandidateSpec, read_candidate
from llamadiff.candidates.source import Context
from llamadiff.engines.capture_request import request_for
from llamadiff.engines.model_file import ModelFile
from llamadiff.engines.own_graph import own_graph
from llamadiff.engines.run_spec import How, Run
from llamadiff.ext.rows.choose import ALL, AUTO, has_gaps, in_words
from llamadiff.ext.rows.row_engine import RowModel, keys_of, words_of
from llamadiff.ext.rows.row_reader import RowReader
from llamadiff.llamacpp.capture import read_run
from llamadiff.llamacpp.child import Child
from llamadiff.llamacpp.request import PLAIN, SCORES, Request
from llamadiff.result.comparison import Comparison
from llamadiff.system.errors import UserError
from llamadiff.trace.reader import Trace

OBSERVER = "llamadiff.ext.rows.row_observer:RowObserver"


def takes(candidate: CandidateSpec | None, how: How) -> bool:
    """Whether rows of a candidate can be judged: those of a trace, a dump, a command or a function.

    Raises UserError where rows were asked for, and cannot be.
    """
    spec = candidate if isinstance(candidate, (str, Path)) else ""
    other = str(spec).startswith(("http://", "https://", "llama.cpp:", "transformers:")) or str(spec).endswith(".gguf")
    taken = not other and how.steps is None and how.engine is None
    if not taken and how.rows is not None:
        raise UserError(
            f"--rows {how.rows[:40]}: rows are those of a trace, a dump or a command, judged by the reference engine; "
            "leave it out, or --candidate, --steps and --engine"
        )
    return taken


def is_of_rows(candidate: CandidateSpec | None) -> bool:
    """Whether a candidate is a trace of some rows of a prompt."""
    if not isinstance(candidate, (str, Path)) or not str(candidate).endswith(".safetensors"):
        return False
    return Path(candidate).is_file() and has_gaps(Trace.open(candidate, bare=True).info.positions)


def compare_rows(
    model: str | Path, candidate: CandidateSpec | None, run: Run, how: How, folder: Path, child: Child
) -> Comparison:
    """Judge some rows of a run; all of them where the model cannot be judged so, and nobody asked for it.

    Raises UserError for whatever a user can mend.
    """
    from llamadiff.verbs.judging import judge
    from llamadiff.verbs.verbs import compare

    brought = read_candidate(candidate, how, run.settings.place)
    if run.prompt is None and not run.tokens:
        raise UserError(f"{candidate}: has some rows of a prompt: give the whole prompt too, or --tokens with all ids")
    settings = replace(run.settings, type_k=_half(run.settings.type_k), type_v=_half(run.settings.type_v))
    try:
        engine = RowModel(ModelFile(model, settings=settings))
        kept = keys_of(engine)
    except UserError:
        if how.rows is not None or is_of_rows(candidate):
            raise
        return compare(model, run, candidate, replace(how, rows=ALL), folder, child)
    run, how = replace(run, settings=settings), replace(how, partial=how.partial or run.is_partial)
    request = replace(
        request_for(engine, run, folder / "baseline.safetensors"),
        rows=_asked(how, engine, brought), everywhere=tuple(kept), way=replace(PLAIN, observer=OBSERVER),
    )  # fmt: skip
    asked = [name for name in request.wanted or () if not name.startswith(SCORES)]
    request = replace(request, wanted=tuple(dict.fromkeys([*asked, *request.everywhere])))
    baseline, tokens = _run(request, engine, asked, how, child)
    if isinstance(candidate, str) and candidate.startswith(PREFIX):
        rows = in_words(baseline.info.positions).replace(" ", "")
        brought = read_candidate(candidate.replace("{rows}", rows), how, run.settings.place)
    trace = None if brought is None else brought.source.load(_context(brought, engine, tokens, baseline))
    graph = own_graph()
    behind = None if graph is None else partial(graph.of_run, engine, baseline, how.progress, run.settings.place, child)
    return judge(engine, baseline, trace, how, graph=behind)


def _half(kind: str) -> str:
    """Of long prompts K and V are kept in float16, as llama.cpp does by itself: in float32 they take twice the room."""
    return "F16" if kind == "F32" else kind


def _asked(how: How, engine: RowModel, brought: Candidate | None) -> str:
    """Which rows, in words: those that the candidate has, if it states any; else what the user asks for."""
    stated = brought.source.run if brought is not None else None
    if stated is not None and has_gaps(stated.positions):
        return in_words(stated.positions).replace(" ", "")
    return words_of(engine, how.rows or AUTO)


def _run(
    request: Request, engine: RowModel, asked: Sequence[str], how: How, child: Child
) -> tuple[Trace, tuple[int, ...]]:
    """llama.cpp's rows of the taps that were asked for, with K and V of all; and all its tokens."""
    kind = partial(RowReader, keys_of=keys_of(engine), asked=frozenset(asked))
    with engine.dequantizer.checking_ahead():
        reader = read_run(request, how.progress, child, kind)
    assert isinstance(reader, RowReader)
    return Trace.open(reader.path), tuple(reader.ended["tokens"])


def _context(brought: Candidate, engine: RowModel, tokens: tuple[int, ...], baseline: Trace) -> Context:
    how = brought.how
    return Context(engine, tokens, len(tokens), brought.mapping, how.timeout, how.progress, baseline, brought.place)
