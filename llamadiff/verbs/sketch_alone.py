"""A sketch without a candidate: how far the engine's own run is from it. It can raise doubts, and acquit nobody.

An op is judged on the inputs that it got, and a sketch has no inputs: every tap stays UNCHECKED. What a sketch tells is
how far the run that it is of was from the engine's, and that is held to what rounding explains.
"""

from __future__ import annotations

from collections.abc import Sequence

from llamadiff.engines.model_file import Runnable
from llamadiff.engines.run_spec import How
from llamadiff.judge.run import run_passes
from llamadiff.judge.sketching import at_most
from llamadiff.judge.verdict import Ruling, of_unjudged
from llamadiff.result.comparison import Comparison, Judged, Sides, assemble
from llamadiff.result.coverage import coverage_of
from llamadiff.result.message import Message
from llamadiff.result.rows import Row, unjudged_row
from llamadiff.trace.reader import Trace

NEXT = ("give a candidate: its own ops are judged in full, by what it records itself",)


def sketch_alone(model: Runnable, baseline: Trace, sides: Sides, how: How) -> Comparison:
    """The engine's own run against a sketch: UNCHECKED, whatever is found."""
    assert baseline.sketch is not None
    passes = run_passes(model, baseline, None, how)
    rows = tuple(unjudged_row(finding) for finding in passes.findings if finding.drift is not None)
    wanted = [tap.name for tap in model.taps if not tap.kind.optional]
    missing = tuple(name for name in wanted if name not in baseline.sketch.rows)
    judged = Judged(
        rows=rows, missing=missing, coverage=coverage_of(rows, missing, baseline, wanted, (), how.partial),
        free_tokens=passes.free_tokens, timing={"engine_s": 0.0, "compare_s": 0.0},
    )  # fmt: skip
    said = _drift_message(rows, baseline.sketch.projections)
    return assemble(sides, judged, Ruling(of_unjudged()), said, NEXT)


def _drift_message(rows: Sequence[Row], projections: int) -> Message:
    """What the drifts come to: where the first is that rounding does not explain."""
    most = at_most(projections)
    limit = f"an estimate of {projections} projections a token is up to {most:.1f} times too large"
    far = next((row for row in rows if row.ratio_to_noise is not None and row.ratio_to_noise > most), None)
    start = "a sketch keeps no tensors, so no op can be judged from it"
    if far is None:
        worst = max((row.ratio_to_noise or 0.0 for row in rows), default=0.0)
        near = (
            f"the engine's own run is near all its {len(rows)} taps: at most {worst:.1f} times what rounding explains"
        )
        return Message(start, (f"{near}, which does not say that they are right", limit))
    assert far.ratio_to_noise is not None
    found = f"the engine's own run leaves it at {far.tap}, by {far.ratio_to_noise:.1f} times what rounding explains"
    return Message(start, (found, limit, "record anew, and look at the difference: llamadiff check --update"))


def note_on(baseline: Trace) -> tuple[str, ...]:
    """What a report says of a baseline that is a sketch."""
    if baseline.sketch is None:
        return ()
    k = baseline.sketch.projections
    return (
        f"the recording is a sketch ({k} projections a token): drift is an estimate, up to {at_most(k):.1f} times too "
        "large, and llama.cpp's own ops are not judged",
    )
