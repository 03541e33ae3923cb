"""What is odd about a file is said beside what compares something else; of a right one nothing is."""

from __future__ import annotations

import numpy as np
import pytest
from models.gguf_file import read_gguf, write_gguf

from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.file.concerns import concerns
from llamadiff.ext.prompt.tokens.concerns import concerns as concerns_of_tokens
from llamadiff.llamacpp.shipped import shipped_model
from llamadiff.verbs.verbs import compare

NAME = "blk.1.ffn_down.weight"


def damaged(path, **changed):
    fields, tensors = read_gguf(shipped_model())
    return write_gguf(path, fields, {**tensors, **changed})


def with_zeros(rows):
    _, tensors = read_gguf(shipped_model())
    data, kind = tensors[NAME]
    data = np.array(data)
    data[rows] = 0
    return {NAME: (data, kind)}


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (slice(3, 9), f"the file looks odd, which may be right: {NAME}: rows 3 to 8"),
        (slice(None), f"the file is damaged: {NAME}: all values are zero"),
    ],
)
def test_a_damaged_file_is_said(tmp_path, rows, says):
    path = damaged(tmp_path / "m.gguf", **with_zeros(rows))
    (line,) = concerns(ModelFile(path))
    assert line.startswith(says)
    assert line.endswith(f"llamadiff weights {path}")


@pytest.mark.parametrize("quantized", [False, True])
def test_a_right_file_is_not(quantized):
    model = ModelFile(shipped_model("Q4_K_M") if quantized else shipped_model())
    assert not [*concerns(model), *concerns_of_tokens(model)]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model": "gpt2", "pre": "llama-bpe", "eos_token_id": 3}, []),
        ({"model": "llama"}, []),
        ({"model": "bert", "pre": "default"}, []),
        ({"model": "gpt2", "pre": "default", "eos_token_id": 3}, ["tokenizer.ggml.pre is 'default': "]),
        ({"model": "gpt2"}, ["tokenizer.ggml.pre is not in the file: ", "tokenizer.ggml.eos_token_id is not in the"]),
    ],
)
def test_keys_of_a_tokenizer(tmp_path, fields, says):
    values = {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    lines = [*concerns_of_tokens(ModelFile(write_gguf(tmp_path / "m.gguf", values)))]
    assert [line[: len(start)] for line, start in zip(lines, says, strict=True)] == says


def test_compare_says_it_before_what_comes_after_the_logits(tmp_path):
    path = damaged(tmp_path / "m.gguf", **with_zeros(slice(3, 9)))
    result = compare(path, [1, 501, 503])
    assert result.verdict in ("match", "noise")
    assert result.next_steps[0].startswith("the file looks odd")
    assert not any("sampling" in step for step in result.next_steps[:-1])
