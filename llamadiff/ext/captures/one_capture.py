"""A capture as one test of somebody's suite: checked, or recorded anew, with the model that it names."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

from llamadiff.candidates.opening import CandidateSpec
from llamadiff.engines.run_spec import USUAL, Gate, How
from llamadiff.ext.captures.changed import Changed
from llamadiff.ext.captures.updating import update
from llamadiff.report.check_lines import in_words, path_text
from llamadiff.report.terminal.escape import escape_line
from llamadiff.report.terminal.report import make_console, render
from llamadiff.result.comparison import Comparison
from llamadiff.trace.reader import Trace
from llamadiff.verbs.check_traces import model_of
from llamadiff.verbs.verbs import check
from llamadiff.words.provenance import provenance

_LONG, _WIDTH = 4000, 110  # cells


def checked(
    path: Path,
    candidate: CandidateSpec | None,
    model: str | Path | None,
    partial: bool,
    limits: tuple[float | None, float | None],
) -> Comparison:
    """What ``check`` makes of one capture; ``limits``: of the mean KL and of its 99th percentile."""
    trace = Trace.open(path)
    return check(trace, model or model_of(path, trace), How(partial=partial, gate=Gate(*limits)), candidate)


def updated(path: Path, model: str | Path | None) -> Changed:
    """The capture, recorded anew."""
    return update(path, Path(model) if model is not None else None, USUAL)


def report_text(path: Path, result: Comparison) -> str:
    """What a failing test shows: the report as on a terminal, without colours, and where the capture is from."""
    text = StringIO()
    console = make_console(text, width=_WIDTH)
    render(result, console)
    said = "" if result.positions is None else f"{in_words(result.positions)}\n"
    return f"{text.getvalue()}{said}{path_text(path)}: {escape_line(provenance(result), _LONG)}"
