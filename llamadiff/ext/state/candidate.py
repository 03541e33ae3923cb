"""``llama.cpp:KEY=VALUE,...`` llama.cpp itself, run in another way on the same tokens."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

from llamadiff.candidates.source import CandidateSource, Context
from llamadiff.engines.capture_request import text_request
from llamadiff.engines.run_spec import Run
from llamadiff.engines.select import capture_run
from llamadiff.ext.state.variation import PREFIX, own_way, schedule_of, varied
from llamadiff.llamacpp.capture import scratch_directory
from llamadiff.llamacpp.request import Request
from llamadiff.system.errors import UserError
from llamadiff.trace.reader import Trace


def matches(spec: str) -> bool:
    """Settings of llama.cpp."""
    return spec.startswith(PREFIX)


def files(spec: str) -> Iterable[Path]:
    """None."""
    return ()


def open_source(spec: str) -> CandidateSource:
    """A run of llama.cpp with other settings, of another build, or with its tokens in other batches."""
    if schedule_of(spec) is not None or own_way(spec) is not None:
        raise UserError(
            f"{spec}: runs tokens of its own; llamadiff variants --only {spec.removeprefix(PREFIX)} does that"
        )
    varied(Request("", tokens=(0,)), spec)  # what is wrong with it is said before anything is run
    return CandidateSource(partial(_run, spec))


def _run(spec: str, context: Context) -> Trace:
    context.progress(f"running llama.cpp with {spec.removeprefix(PREFIX)}")
    with scratch_directory() as folder:
        run = Run(tokens=context.tokens, settings=context.place)
        request = text_request(context.model, run, Path(folder) / "varied.safetensors")
        return capture_run(context.model, varied(request, spec), context.progress)[1]
