"""Metadata that lies: any value for any key of any architecture is an error in one line, or a model that runs."""

from __future__ import annotations

import math
from itertools import product

import pytest
from llamaref import ModelError, Weights
from llamaref.metadata import implemented
from llamaref.models import ARCHITECTURES

from llamadiff import UserError, taps
from llamadiff.candidates.engine import record
from llamadiff.model import Model

LIES = (0, 1, 3, 7, 1 << 20, (1 << 31) - 1, -1, 0.0, -1.5, 1e30, math.nan, "x", [], [1, 2], True, None)


def refusal(path):
    """What is said of a model that cannot be run; empty for one that runs, and gives what its taps say."""
    try:
        model = Model(path)
        trace = record(model.engine, (1, 2), "engine")
    except (UserError, ModelError) as error:
        return str(error)
    assert {tap: trace.shape(tap) for tap in trace} == {
        tap.name: taps.shape_of(tap, 2, model.sizes) for tap in model.taps
    }
    return ""


@pytest.mark.parametrize("name", ["moe", "deepseek2-old", *ARCHITECTURES])
def test_a_value_of_the_metadata_that_lies_is_refused_or_runs(name, small_model, monkeypatch):
    path = small_model(name)
    weights = Weights(path)
    right, architecture = dict(weights.fields), weights.fields["general.architecture"]
    monkeypatch.setattr("llamadiff.model.Weights", lambda *_: weights)
    assert refusal(path) == ""
    for key, value in product(sorted(implemented(architecture)), LIES):
        weights.fields = {**right, f"{architecture}.{key}": value}
        said = refusal(path)
        assert len(said) < 500, (key, value)
        assert "\n" not in said, (key, value)
