"""What a report says of a model file, whatever its architecture and its metadata."""

from __future__ import annotations

import pytest
from models.gguf_file import write_gguf

from llamadiff.engines.model_file import ModelFile


@pytest.mark.parametrize(("value", "most"), [(8, 8), ([4, 8, 0], 8), ("8", 0), (None, 0)])
def test_a_count_is_the_largest_of_the_layers(value, most, tmp_path):
    fields = {} if value is None else {"llama.attention.head_count": value}
    said = ModelFile(write_gguf(tmp_path / "m.gguf", fields)).describe()
    assert (said["heads"], said["kv_heads"]) == (most, most)
