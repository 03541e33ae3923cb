"""Files that lie: any value of the metadata and any shape of a tensor is an error in one line, or a model that runs."""

from __future__ import annotations

import math
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from llamaref import ModelError, Weights
from llamaref.metadata import implemented_keys
from llamaref.models import ARCHITECTURES

from llamadiff import UserError
from llamadiff.candidates.reference import record
from llamadiff.engines.reference_model import Model
from llamadiff.trace import taps

LIES = (0, 1, 3, 7, 1 << 20, (1 << 31) - 1, -1, 0.0, -1.5, 1e30, math.nan, "x", [], [1, 2], True, None)
EVERY = ("moe", "deepseek2-old", *ARCHITECTURES)


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


@pytest.mark.parametrize("name", EVERY)
def test_a_value_of_the_metadata_that_lies_is_refused_or_runs(name, small_model, monkeypatch):
    path = small_model(name)
    weights = Weights(path)
    right, architecture = dict(weights.fields), weights.fields["general.architecture"]
    monkeypatch.setattr("llamadiff.engines.model_file.Weights", lambda *_: weights)
    assert refusal(path) == ""
    for key, value in product(sorted(implemented_keys(ARCHITECTURES[architecture].TRAITS)), LIES):
        weights.fields = {**right, f"{architecture}.{key}": value}
        said = refusal(path)
        assert len(said) < 500, (key, value)
        assert "\n" not in said, (key, value)


@pytest.mark.parametrize("name", EVERY)
def test_a_tensor_that_is_missing_or_of_another_shape_is_refused_or_not_needed(name, small_model, monkeypatch):
    path = small_model(name)
    weights = Weights(path)
    right = weights._tensors
    monkeypatch.setattr("llamadiff.engines.model_file.Weights", lambda *_: weights)
    for tensor in [name for name in right if not name.startswith("blk.1.")]:
        weights._tensors = {name: found for name, found in right.items() if name != tensor}
        assert len(refusal(path)) < 500, tensor
        shape = tuple(int(size) for size in right[tensor].shape)
        for other in ((1,), (*shape, 2), (shape[0] + 1, *shape[1:])):
            values = np.zeros(other[::-1], right[tensor].data.dtype)
            wrong = SimpleNamespace(tensor_type=right[tensor].tensor_type, shape=np.array(other), data=values)
            weights._tensors = {**right, tensor: wrong}
            said = refusal(path)
            assert said, (tensor, other)
            assert len(said) < 500, (tensor, other)
            assert "\n" not in said, (tensor, other)
