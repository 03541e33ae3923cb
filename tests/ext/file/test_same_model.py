"""Another model is refused before its tensors are accused; the same one is known in any layout and any type."""

from __future__ import annotations

import numpy as np
import pytest
from llamaref import Weights
from models.small import write_model

from llamadiff import UserError
from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.file.same_model import check_same_kind, check_same_matrices
from llamadiff.ext.file.views import Stored


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """The matrices of a file in float32."""
    weights = Weights(write_model(tmp_path_factory.mktemp("same") / "m.gguf", kind="F32", layers=1))
    return {name: weights.whole(name) for name in weights if len(weights.shape(name)) > 1}


LAYOUTS = {
    "as they are": lambda name, x: x,
    "transposed": lambda name, x: x.T,
    "in another order": lambda name, x: x[::-1],
    "negated": lambda name, x: -x,
    "one more row": lambda name, x: np.concatenate([x, x[:1]]),
    "one of three damaged": lambda name, x: np.ones_like(x) if name.startswith("blk.0.ffn") else x,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["F32", "Q4_0"])
def test_the_same_model_is_known(layout, kind, original, tmp_path):
    file = ModelFile(write_model(tmp_path / "m.gguf", kind=kind, layers=1))
    views = {name: Stored(np.ascontiguousarray(LAYOUTS[layout](name, x)), "F32") for name, x in original.items()}
    check_same_matrices(file, {**views, "empty": Stored(np.zeros((256, 0), np.float32), "F32")}, "the other")


def test_another_model_is_refused(original, tmp_path):
    file = ModelFile(write_model(tmp_path / "other.gguf", layers=1, seed=2))
    views = {name: Stored(x, "F32") for name, x in original.items()}
    with pytest.raises(UserError, match=r"the other: holds another model than other.gguf: 9 of 9 matrices"):
        check_same_matrices(file, views, "the other")


@pytest.mark.parametrize(
    ("kind", "is_refused"), [("qwen2", True), ("mistral", False), ("unheard_of", False), ("gemma3_text", True)]
)
def test_a_config_of_another_architecture_is_refused(kind, is_refused, tmp_path):
    file = ModelFile(write_model(tmp_path / "m.gguf", layers=1))
    if not is_refused:
        check_same_kind(file, {"model_type": kind}, tmp_path)
        return
    with pytest.raises(UserError, match=f"model_type is '{kind}', m.gguf holds llama; give the checkpoint"):
        check_same_kind(file, {"model_type": kind}, tmp_path)
