"""A trace that was recorded with another file: another model, or the same one in another quantization."""

from __future__ import annotations

import math

from llamadiff.engines.model_file import Runnable
from llamadiff.judge.finding import Finding
from llamadiff.judge.preflight.checks import Check
from llamadiff.judge.study import Bench, Study
from llamadiff.judge.verdict import WRONG, of_check
from llamadiff.system.errors import UserError
from llamadiff.trace import taps
from llamadiff.trace.reader import Trace

LOOKUP = "embd"  # the tap that a weight makes of ids alone: no activation rounds it
LEAST = 4  # taps of weights that are off
NEAR = (5e-6, 0.3)  # NMSE of what another quantization makes, Q8_0 2e-5; of weights in bfloat16 it is 3e-6 at most
EVEN = 1e-3  # of a tap's error: what each row has of it at least
KINDS = 3  # kinds of taps with sizes that are not the model's, which no one bug makes
OTHER = 0.5  # NMSE of a product with a matrix that has nothing of the right one
SIZES = {"embd", "ff", "vocab"}  # of a model, which one engine has not wrong at once
PADDED = 1.1  # times its columns: what padding may make of a tap


def refuse_other_model(model: Runnable, trace: Trace) -> None:
    """Raise UserError for a trace of other sizes than the model's: more than padding, shards or one bug explain."""
    misfits, kinds, axes = dict[str, str](), set[str](), set[str]()
    known, n_tokens = {tap.name: tap for tap in model.taps}, len(trace.info.tokens)
    for name in trace:
        tap = known.get(name)
        want = model.shape_of(tap, n_tokens) if tap is not None and name not in trace.known else None
        if tap is None or want is None or "key" in tap.kind.axes or trace.shape(name)[tap.row_axis] != n_tokens:
            continue
        have, right = (math.prod(shape) // n_tokens for shape in (trace.shape(name), want))
        if have != right:
            misfits[name] = f"{name} has {have} columns, {right} are right"
            kinds.add(tap.kind.word)
            shard = right % have == 0 and "embd" not in tap.kind.axes
            axes |= set() if shard or right < have <= PADDED * right else {*tap.kind.axes} & SIZES
    deepest = max((taps.layer_of(name) or 0 for name in trace if taps.parse(name)), default=0)
    more = deepest >= model.n_layer and "vocab" in axes
    if more or len(axes) > 1 or ("embd" in axes and len(kinds) >= KINDS):
        what = f"it has layer {deepest} of 0 to {model.n_layer - 1}, and " if more else ""
        raise UserError(
            f"{trace.path or 'the candidate'}: is a trace of another model than {model.path.name}: {what}the sizes of "
            f"{len(misfits)} of its {len(trace)} taps do not fit, the first: {next(iter(misfits.values()))}; give the "
            "model that it is of"
        )


def refuse_other_weights(bench: Bench, study: Study, given: Trace) -> None:
    """Raise UserError where every op with a weight, the lookup and the norms among them, gives what other weights give.

    Blocks that are decoded wrongly leave norms right, and positions or layers that are mixed up the lookup.
    """
    matrices, vectors = list[float](), list[bool]()
    lookup = 0.0
    for finding in study.passes.findings:
        local, weight = finding.local.get(study.under_test), bench.model.weight_names.get(finding.tap.name)
        if local is None or weight is None:
            continue
        lookup = local.nmse if finding.tap.name == LOOKUP else lookup
        if len(bench.model.weights.shape(weight)) == 1:
            vectors.append(local.verdict == WRONG)
        elif not local.span:
            matrices.append(local.nmse)
    if lookup > OTHER and len(matrices) >= LEAST and min(matrices) > OTHER and vectors and all(vectors):
        raise UserError(
            f"{given.path or 'the candidate'}: is a trace of another model than {bench.model.path.name}: the lookup "
            f"(NMSE {lookup:.1e}), all {len(matrices) - 1} recorded products and all {len(vectors)} norms are of other "
            "weights; give the model that it is of"
        )


def other_weights(bench: Bench, study: Study) -> Check | None:
    """That every op with a weight is a little off, and no other: the weights are others than the file's."""
    model, off, wrong = bench.model, list[Finding](), set[str]()
    with_weight = 0
    for finding in study.passes.findings:
        local = finding.local.get(study.under_test)
        if local is None:
            continue
        weight = model.weight_names.get(finding.tap.name)
        is_matrix = weight is not None and len(model.weights.shape(weight)) > 1
        with_weight += is_matrix
        rows = [row for row in local.per_token if math.isfinite(row)]
        even = bool(rows) and min(rows) > EVEN * local.nmse
        near = is_matrix and even and not local.span and NEAR[0] < local.nmse < NEAR[1]
        if local.verdict == WRONG and not near:
            return None
        if near:  # where an arithmetic may round as much, it is noise to the judge
            off.append(finding)
            wrong |= {finding.tap.name} if local.verdict == WRONG else set()
    if LOOKUP not in wrong or len(off) < max(LEAST, with_weight // 2):
        return None
    errors = sorted(math.sqrt(finding.local[study.under_test].nmse) for finding in off)
    found = (
        f"its weights are near {model.path.name}'s, and are others: {len(off)} products and lookups are off by "
        f"{100 * errors[0]:.2g} % to {100 * errors[-1]:.2g} %, and no other op is wrong; give the file that was run, "
        "such as another quantization"
    )
    return Check("weights", of_check(found), found)
