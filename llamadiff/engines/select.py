"""Which engine runs a file: the reference engine where it can, llama.cpp's own graph elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from llamadiff.engines.capture_request import text_request
from llamadiff.engines.model_file import ModelFile, Runnable, adapter_settings, check_same_model
from llamadiff.engines.own_graph import needed_graph, own_graph
from llamadiff.engines.reference_model import Model
from llamadiff.engines.run_spec import USUAL, How, Run
from llamadiff.llamacpp.capture import capture, scratch_directory
from llamadiff.llamacpp.child import Child
from llamadiff.llamacpp.request import Request, Settings
from llamadiff.llamacpp.streaming import streamed_trace
from llamadiff.system.errors import UnrunnableError, UserError
from llamadiff.system.progress import Progress, silent
from llamadiff.trace.reader import Trace


def in_engine(file: ModelFile, how: How = USUAL) -> tuple[Model | None, EngineUsed]:
    """The file in the reference engine; None where llama.cpp's graph has to do, for the reason that EngineUsed gives.

    Raises UserError where the engine or the precision that is asked for cannot be had.
    """
    engine, precision = how.engine, how.precision
    if engine == GRAPH:
        if precision != "f32":
            raise UserError(f"--engine numpy:{precision} is the reference engine's; leave it out with --engine graph")
        needed_graph("--engine graph")
        return None, EngineUsed(GRAPH)
    try:
        return Model(file.path, precision, file.settings, file.weights), EngineUsed(NUMPY)
    except UserError as refused:
        if own_graph() is None:
            raise
        option = f"--engine {NUMPY if precision == 'f32' else f'{NUMPY}:{precision}'}"
        if engine == NUMPY or precision != "f32":
            raise UserError(f"{refused}; without {option}, llama.cpp's own graph is checked") from None
        reason = str(refused).removeprefix(f"{file.path}: ")
        return None, EngineUsed(GRAPH, reason.partition("; the engine has")[0])


def capture_run(
    engine: Runnable | None, request: Request, progress: Progress, child: Child | None = None
) -> tuple[Runnable, Trace]:
    """llama.cpp's run, and what goes through it again: the engine, or else the graph that llama.cpp ran."""
    if engine is None or engine.by_graph:
        return needed_graph("this run").run(Path(request.model), request, progress, child)
    with engine.dequantizer.checking_ahead():
        if request.keep_graph:
            return engine, needed_graph("this run").capture(request, progress, child)
        return engine, capture(request, progress, child)


@contextmanager
def stream_run(
    engine: Runnable | None, request: Request, progress: Progress, child: Child
) -> Iterator[tuple[Runnable, Trace]]:
    """The same, while llama.cpp still is at it, where names of taps and all tokens are known: a prompt in one batch."""
    in_steps = request.n_predict or request.batches or 0 < request.n_prefill < len(request.tokens)
    if engine is None or in_steps:
        yield capture_run(engine, request, progress, child)
        return
    with engine.dequantizer.checking_ahead(), streamed_trace(request, progress, child) as trace:
        yield engine, trace


@contextmanager
def after_what_the_engine_said(file: ModelFile, used: EngineUsed) -> Iterator[None]:
    """Where llama.cpp cannot run a file either, the engine that knows its architecture says first what is wrong."""
    try:
        yield
    except UnrunnableError as error:
        if used.because is None or not file.has_engine:
            raise
        raise UserError(f"{file.path}: {used.because}; {str(error).removeprefix(f'{file.path}: ')}") from None


def opened_for(
    path: str | Path, trace: Trace, whose: str, progress: Progress = silent, threads: int = 0
) -> tuple[Runnable, EngineUsed]:
    """The model file in an engine that can go through a trace of it; llama.cpp is run where its graph is needed.

    Raises UserError, also for a trace of another file, or with an adapter that is not there.
    """
    file = ModelFile(path, settings=adapter_settings(trace, path, Settings(threads=threads)))
    check_same_model(trace.info.model, file.sha256, whose, file.path)
    return _in_any(file, trace.info.tokens, progress)


def runnable(path: str | Path, n_tokens: int) -> Runnable:
    """The model file in an engine, for so many tokens."""
    return _in_any(ModelFile(path), (0,) * n_tokens, silent)[0]


def _in_any(file: ModelFile, tokens: tuple[int, ...], progress: Progress) -> tuple[Runnable, EngineUsed]:
    model, used = in_engine(file)
    if model is not None:
        return model, used
    with scratch_directory() as folder, after_what_the_engine_said(file, used):
        request = text_request(file, Run(tokens=tokens, settings=file.settings), Path(folder) / "trace")
        return needed_graph("this model").run(file.path, request, progress, None)[0], used


NUMPY, GRAPH = "numpy", "graph"


@dataclass(frozen=True)
class EngineUsed:
    """Which engine judged: NUMPY, the reference engine, or GRAPH, llama.cpp's graph; ``because``: why not the first."""

    name: str
    because: str | None = None
