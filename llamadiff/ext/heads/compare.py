"""llama.cpp's heads of a model, judged, or a candidate's: its taps by llama.cpp's graph of trunk and heads in one."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from llamadiff.candidates.opening import Candidate, CandidateSpec, read_candidate
from llamadiff.engines.capture_request import text_request
from llamadiff.engines.model_file import ModelFile
from llamadiff.engines.run_spec import How, Run
from llamadiff.engines.select import GRAPH, EngineUsed
from llamadiff.ext.graph.model import GraphModel
from llamadiff.ext.heads.drafts import with_drafts
from llamadiff.ext.heads.head_names import by_heads, with_own_names
from llamadiff.ext.heads.head_reader import HeadReader
from llamadiff.ext.heads.trunk_given import explain_with_trunk
from llamadiff.llamacpp.capture import read_run, scratch_directory
from llamadiff.llamacpp.child import Child
from llamadiff.llamacpp.request import Request
from llamadiff.result.comparison import Comparison
from llamadiff.system.errors import UserError
from llamadiff.trace.reader import Trace

OTHERS = ("http://", "https://", "llama.cpp:", "transformers:", "record:")  # kinds that have no head's values
ERRAND = "llamadiff.ext.heads.head_observer:run_heads"


def compare_heads(
    model: str | Path, run: Run, candidate: CandidateSpec | None, how: How, child: Child | None = None
) -> Comparison:
    """Run llama.cpp's trunk and heads on a prompt, and judge the heads, or a candidate's.

    Raises UserError for whatever a user can mend.
    """
    started = time.perf_counter()
    _check_kind(candidate)
    brought = read_candidate(candidate, how, run.settings.place)
    run = run if brought is None else brought.tokens_for(run)
    file = ModelFile(model, settings=run.settings)
    with scratch_directory() as folder:
        request = text_request(file, run, Path(folder) / "heads.safetensors")
        engine, baseline = run_heads(file, request, how, child)
        capture_s = time.perf_counter() - started
        result = judge_heads(engine, baseline, brought, how)
    timing = {"capture_s": capture_s, **result.timing, "total_s": time.perf_counter() - started}
    return replace(result, engine=EngineUsed(GRAPH), timing=timing)


def _check_kind(candidate: CandidateSpec | None) -> None:
    """Raise UserError for a candidate of which no head's values can be had."""
    spec = str(candidate) if isinstance(candidate, (str, Path)) else ""
    if spec.startswith(OTHERS) or spec.endswith(".gguf"):
        raise UserError(f"{spec[:80]}: heads are compared with a trace, a dump or a command; give one of these")


def judge_heads(engine: GraphModel, baseline: Trace, brought: Candidate | None, how: How) -> Comparison:
    """llama.cpp's heads, judged by its graph, or a candidate's. Raises UserError for one that ran other tokens."""
    from llamadiff.verbs.judging import judge

    if brought is None:
        return with_drafts(judge(engine, baseline, None, how), baseline, None)
    brought = replace(brought, mapping=with_own_names(brought.mapping, engine))
    trace = brought.load_trace(by_heads(engine), baseline)
    result = explain_with_trunk(judge(engine, baseline, trace, how), engine, baseline, trace, how)
    return with_drafts(result, baseline, trace)


def run_heads(file: ModelFile, request: Request, how: How, child: Child | None) -> tuple[GraphModel, Trace]:
    """llama.cpp's graph of trunk and heads as an engine, and the trace of its taps."""
    request = replace(request, errand=ERRAND, weights=tuple(file.tensors))
    reader = read_run(request, how.progress, child, HeadReader)
    assert isinstance(reader, HeadReader)
    return GraphModel(file.path, reader.graph, request.settings), Trace.open(reader.path)
