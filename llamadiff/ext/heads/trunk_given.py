"""Why a head is wrong whose trunk was not recorded: causes are sought as if that had given what the engine computes.

Or what llama.cpp's gave: whichever is the nearer. The verdict stays what it was: it allows for a trunk's own rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llamadiff.candidates.reference import record
from llamadiff.engines.run_spec import How
from llamadiff.ext.graph.model import GraphModel
from llamadiff.ext.heads.head_reader import OF_TRUNK
from llamadiff.result.comparison import Comparison
from llamadiff.result.rows import with_explanations
from llamadiff.trace.reader import Trace
from llamadiff.trace.taps import layer_of

TAKEN_FOR_ITS_OWN = "nothing was recorded of the trunk: causes were sought as if its layers were right"


def trunk_taps(model: GraphModel) -> list[str]:
    """The taps of the trunk's layers."""
    last = model.graph.labelled[OF_TRUNK].number
    return [label for label, node in model.graph.labelled.items()
            if node.number < last and layer_of(label) is not None]  # fmt: skip


def with_trunk(candidate: Trace, trunk: Trace, names: Sequence[str]) -> Trace:
    """A candidate's trace with some taps of another one."""
    arrays = {name: candidate[name] for name in candidate} | {name: trunk[name] for name in names}
    return Trace(
        candidate.info, arrays, dict.fromkeys(arrays, "F32"), known=candidate.known, kept=candidate.kept,
        printed=candidate.printed,
    )  # fmt: skip


def explain_with_trunk(
    result: Comparison, model: GraphModel, baseline: Trace, candidate: Trace, how: How
) -> Comparison:
    """The result with causes of what is wrong behind the trunk, and had none."""
    from llamadiff.verbs.judging import judge, ruled_again

    names = [name for name in trunk_taps(model) if name in baseline]
    known = {tap for each in result.diagnosis if each.known for tap in each.taps}
    unknown = {row.tap for row in result.wrong if row.local is not None and OF_TRUNK in row.local.span} - known
    if not unknown or any(name in candidate for name in (*names, OF_TRUNK)):
        return result
    for trunk in (record(model.engine, candidate.info.tokens, "trunk"), baseline):
        filled = with_trunk(candidate, trunk, names)
        told = judge(model, baseline, filled, replace(how, thorough=True)).diagnosis
        found = tuple(each for each in told if unknown >= set(each.taps) and (each.known or any(each.read.values())))
        if any(each.known for each in found):
            break
    if not found:
        return result
    explained = {tap for each in found for tap in each.taps}
    kept = (each for each in result.diagnosis if explained.isdisjoint(each.taps))
    return ruled_again(replace(
        result, rows=with_explanations(result.rows, found), diagnosis=(*kept, *found),
        notes=(*result.notes, TAKEN_FOR_ITS_OWN),
    ))  # fmt: skip
