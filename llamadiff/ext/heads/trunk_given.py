"""Why a head is wrong whose trunk was not recorded: causes are sought as if its layers had given what llama.cpp's did.

The verdict stays what it was: it allows for what a trunk's own rounding may have done.
"""

from __future__ import annotations

from dataclasses import replace

from llamadiff.engines.run_spec import How
from llamadiff.ext.graph.model import GraphModel
from llamadiff.ext.heads.head_reader import OF_TRUNK
from llamadiff.judge.verdict import of_run
from llamadiff.result.comparison import Comparison
from llamadiff.result.rows import with_explanations
from llamadiff.trace.reader import Trace
from llamadiff.trace.taps import layer_of
from llamadiff.words.advice import next_steps
from llamadiff.words.summary import summarize

TAKEN_FOR_ITS_OWN = "nothing was recorded of the trunk: causes were sought as if its layers gave what llama.cpp's do"


def trunk_taps(model: GraphModel) -> list[str]:
    """The taps up to the hidden states that the heads take."""
    last = model.graph.labelled[OF_TRUNK].number
    return [label for label, node in model.graph.labelled.items() if node.number <= last]


def with_trunk(candidate: Trace, baseline: Trace, model: GraphModel) -> Trace | None:
    """A candidate's trace with the layers of the baseline's trunk, up to what is handed over; None where it recorded of
    its own.
    """
    names = [name for name in trunk_taps(model) if name in baseline]
    if any(name in candidate for name in names):
        return None
    names = [name for name in names if layer_of(name) is not None]
    arrays = {name: candidate[name] for name in candidate} | {name: baseline[name] for name in names}
    return Trace(
        candidate.info, arrays, dict.fromkeys(arrays, "F32"), known=candidate.known, kept=candidate.kept,
        printed=candidate.printed,
    )  # fmt: skip


def explain_with_trunk(
    result: Comparison, model: GraphModel, baseline: Trace, candidate: Trace, how: How
) -> Comparison:
    """The result with causes of what is wrong that it had none for."""
    from llamadiff.verbs.judging import judge

    known = {tap for each in result.diagnosis if each.known for tap in each.taps}
    unknown = {row.tap for row in result.wrong} - known
    filled = with_trunk(candidate, baseline, model) if unknown else None
    if filled is None:
        return result
    told = judge(model, baseline, filled, how).diagnosis
    found = tuple(each for each in told if unknown >= set(each.taps))
    if not any(each.known or any(each.read.values()) for each in found):
        return result
    explained = {tap for each in found for tap in each.taps}
    kept = (each for each in result.diagnosis if explained.isdisjoint(each.taps))
    result = replace(
        result, rows=with_explanations(result.rows, found), diagnosis=(*kept, *found),
        notes=(*result.notes, TAKEN_FOR_ITS_OWN),
    )  # fmt: skip
    verdicts = [row.verdict for row in result.rows], [each.verdict for each in result.preflight]
    ruling = of_run(*verdicts, result.blamed, result.coverage is not None and result.coverage.is_enough)
    said, steps = summarize(ruling.verdict, result, result), next_steps(ruling.verdict, result, result.is_engine)
    return replace(
        result, verdict=ruling.verdict, reasons=ruling.reasons, headline=said.headline, proof=said.clauses,
        next_steps=steps,
    )  # fmt: skip
