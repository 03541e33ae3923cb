"""The models that the tests make: the same on every machine, of every type that is asked for."""

from __future__ import annotations

import gguf
import pytest

from models.random_models import NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_random_model_has_what_its_name_says(name, random_model):
    arch, _, kind = name.partition(".")
    reader = gguf.GGUFReader(random_model(name))
    assert reader.fields["general.architecture"].contents() == arch
    types = {tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1}
    assert kind.removesuffix("_M") in types
    assert f"{arch}.expert_count" in reader.fields  # zero means unset: llama.cpp saves every key
