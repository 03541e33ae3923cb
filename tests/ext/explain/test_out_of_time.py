"""A hypothesis whose computing takes too long."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from graphs_by_hand import engine_of, node, ramp
from llamaref import Tap

from llamadiff.ext.explain.budget import Budget
from llamadiff.ext.explain.case import OutOfTimeError
from llamadiff.ext.explain.subgraph import Subgraph


def test_a_hypothesis_that_cannot_be_computed_is_not_the_cause():
    def fails(op: Any) -> Any:
        raise IndexError

    nodes = [node(1, "SCALE", (1, 1, 1, 2), 0, params=np.array([2, 0], np.float32).tobytes())]
    engine = engine_of(nodes, {0: ramp(1, 1, 1, 2)})
    case: Any = SimpleNamespace(carrier=Tap(), tap=SimpleNamespace(name="n1"), budget=None)
    nodes[0] = replace(nodes[0], label="n1")
    right = Subgraph(engine, tuple(nodes), {})
    assert right.compute(case).ravel().tolist() == [2, 4]
    wrong = replace(right, altered={1: fails})
    assert np.isnan(wrong.compute(case)).all()
    case.budget = Budget.of_seconds(0)
    with pytest.raises(OutOfTimeError):
        wrong.compute(case)
