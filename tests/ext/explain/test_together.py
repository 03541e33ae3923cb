"""Bugs that are tried as lanes of one pass leave what each leaves that is tried alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from llamadiff.candidates.reference import record
from llamadiff.engines.capture_request import text_request
from llamadiff.engines.model_file import ModelFile
from llamadiff.engines.run_spec import Run
from llamadiff.ext.explain.alter import gives, times, with_source
from llamadiff.ext.explain.budget import Budget
from llamadiff.ext.explain.case import Case, NotRecordedError, Recording
from llamadiff.ext.explain.subgraph import subgraph_of
from llamadiff.ext.explain.together import errors
from llamadiff.ext.graph.model import by_its_graph
from llamadiff.numerics.rounding_tap import Carrier

TOKENS = (1, 17, 5, 80, 42, 9, 33)
ONE, SEVERAL = [("f32", {})], [("f32", {}), ("native", {}), ("bf16", {})]


@pytest.fixture(scope="module")
def recorded(small_model, tmp_path_factory):
    path = small_model("moe", "Q8_0")
    request = text_request(ModelFile(path), Run(tokens=TOKENS), tmp_path_factory.mktemp("graph") / "b.safetensors")
    model, _ = by_its_graph(path, request)
    return model, record(model.engine, TOKENS, "right")


@pytest.fixture(params=[ONE, SEVERAL], ids=["one arithmetic", "several"])
def case(request, recorded):
    """A span of a whole layer, whose output is a little off."""
    model, right = recorded
    shapes = {name: right[name].shape for name in right}
    n = len(TOKENS)
    run = Recording(model, TOKENS, np.arange(n), (0, n), n, Carrier(request.param), shapes, {})

    def values(name):
        if name != "l_out-0":
            raise NotRecordedError(name)
        return right[name][None]

    tap = next(tap for tap in model.taps if tap.name == "l_out-1")
    return Case(run, tap, values, np.asarray(right["l_out-1"]) * np.float32(1.1))


def refused(n):
    raise ValueError("it cannot take this")


def test_lanes_are_as_if_each_were_alone(case):
    base = subgraph_of(case)
    inside = [node for node in base.nodes if base.computes(node) and node.kind == "f32"]
    edits = [gives(lambda x: x * np.float32(0.7)), times(0, 1.3), refused, with_source(0, lambda n: n.x()[..., :1])]
    subs = [replace(base, altered={node.number: edit}) for node in inside for edit in edits if node.op != "VIEW"]
    subs += [base, replace(base, altered={inside[0].number: edits[0], inside[-1].number: edits[0]})]
    together = list(errors(case, subs))
    with np.errstate(all="ignore"):
        alone = [_alone(case, sub) for sub in subs]
    assert len(subs) > 80
    assert len(set(together)) > 20
    np.testing.assert_allclose(together, alone, rtol=1e-3, atol=1e-12)


def _alone(case, sub):
    try:
        return case.nmse(sub.compute(case))
    except NotRecordedError:
        return float("inf")


def test_no_lane_is_tried_when_the_budget_is_spent(case):
    base = subgraph_of(case)
    list(errors(case, [base]))
    late = replace(case, budget=Budget(0))
    alter = {base.nodes[-1].number: gives(lambda x: x)}
    assert list(errors(late, [replace(base, altered=alter)] * 3)) == [float("inf")] * 3
