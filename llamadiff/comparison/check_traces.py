"""The CI command: every recorded trace against the engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from llamadiff.comparison.result import Comparison
from llamadiff.comparison.verbs import check
from llamadiff.engines.run_spec import How
from llamadiff.shipped.place import shipped_model
from llamadiff.system.errors import UserError
from llamadiff.trace.reader import Trace

Results = Sequence[tuple[Path, Comparison]]


def check_all(paths: Iterable[Path], model: Path | None, how: How) -> Results:
    """Check each trace, and each trace in each directory. Raises UserError if there is none or a model is missing."""
    results = []
    for path in traces_in(paths):
        trace = Trace.open(path)
        results.append((path, check(trace, model or _model_of(path, trace), how)))
    return results


def traces_in(paths: Iterable[Path]) -> list[Path]:
    """These traces, and those of these directories. Raises UserError for a directory that has none."""
    return [trace for path in paths for trace in _traces(path)]


def _traces(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    traces = sorted(path.glob("*.safetensors"))
    if not traces:
        raise UserError(f"{path}: no .safetensors trace in this directory")
    return traces


def _model_of(path: Path, trace: Trace) -> Path:
    """The model file that a trace names: beside the trace, or shipped with the package."""
    name = Path(str(trace.info.model.get("file") or "")).name  # a name alone: a trace must not lead elsewhere
    for folder in (path.parent, shipped_model().parent):
        if name and (folder / name).is_file():
            return folder / name
    raise UserError(f"{path}: its model {name or '(unnamed)'} is not beside it; give it with --model")
