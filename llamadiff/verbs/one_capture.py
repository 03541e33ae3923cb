"""A capture as one test of somebody's suite: checked, or recorded anew, with the model that it names."""

from __future__ import annotations

from pathlib import Path

from llamadiff.candidates.opening import Candidate
from llamadiff.engines.run_spec import USUAL, Gate, How
from llamadiff.result.comparison import Comparison
from llamadiff.trace.reader import Trace
from llamadiff.verbs.check_traces import model_of
from llamadiff.verbs.updating import Changed, update
from llamadiff.verbs.verbs import check


def checked(
    path: Path,
    candidate: Candidate | None,
    model: str | Path | None,
    partial: bool,
    limits: tuple[float | None, float | None],
) -> Comparison:
    """What ``check`` makes of one capture; ``limits``: of the mean KL and of its 99th percentile."""
    trace = Trace.open(path)
    return check(trace, _model(path, trace, model), How(partial=partial, gate=Gate(*limits)), candidate)


def updated(path: Path, model: str | Path | None) -> Changed:
    """The capture, recorded anew."""
    return update(path, _model(path, Trace.open(path), model), USUAL)


def _model(path: Path, trace: Trace, model: str | Path | None) -> Path:
    return Path(model) if model is not None else model_of(path, trace)
