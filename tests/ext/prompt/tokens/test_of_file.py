"""Tables of two files' tokenizers: the first entry that differs is said in the words that a checkpoint's has."""

from __future__ import annotations

import json

import pytest
from models.gguf_file import write_gguf

from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.prompt.tokens.of_checkpoint import open_tokenizers, table_oddities
from llamadiff.ext.prompt.tokens.of_file import FileTokenizer

KEY = "tokenizer.ggml."
WORDS = ["a", "b", "ab", "<e>"]
FIELDS = {
    "model": "gpt2", "pre": "qwen2", "tokens": WORDS, "merges": ["a b", "ab b"], "token_type": ([1, 1, 1, 3], 9, 5),
    "scores": ([0.0, 0.0, 0.0, 0.0], 9, 6), "eos_token_id": 3,
}  # fmt: skip
TABLES = [
    ({}, "", ""),
    ({"tokens": ["a", "c", "ab", "<e>"]}, "tokens", "token 1 is 'c'; {0} has 'b'"),
    ({"token_type": ([1, 1, 1, 1], 9, 5)}, "token_type", "token 3 '<e>' is special in {0}, normal here"),
    ({"merges": ["a b"]}, "merges", "merge 1 is not there; {0} has 'ab b' (1 merges, 2 there)"),
    ({"merges": ["ab b", "a b"]}, "merges", "merge 0 is 'ab b'; {0} has 'a b' (2 merges, 2 there)"),
]  # fmt: skip
SCORES = ({"scores": ([0.0, 0.0, -1.0, 0.0], 9, 6)}, "scores", "token 2 has -1; {0} has 0")


def file(path, changed):
    return write_gguf(path, {KEY + key: value for key, value in {**FIELDS, **changed}.items()})


@pytest.mark.parametrize(("changed", "where", "says"), [*TABLES, SCORES])
def test_of_another_file(tmp_path, changed, where, says):
    right = file(tmp_path / "right.gguf", {})
    found = [*FileTokenizer(right).oddities(ModelFile(file(tmp_path / "m.gguf", changed)))]
    assert [(each.where, each.says) for each in found] == [(KEY + where, says.format("right.gguf"))] * bool(where)


@pytest.mark.parametrize("pairs", [True, False])
@pytest.mark.parametrize(("changed", "where", "says"), TABLES)
def test_of_a_checkpoint(tmp_path, changed, where, says, pairs):
    merges = [each.split() if pairs else each for each in FIELDS["merges"]]
    model = {"type": "BPE", "vocab": {text: i for i, text in enumerate(WORDS)}, "merges": merges}
    added = [{"id": 3, "content": "<e>", "special": True}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": added}), "utf-8")
    found = [*table_oddities(ModelFile(file(tmp_path / "m.gguf", changed)), open_tokenizers(tmp_path))]
    assert [(each.where, each.says) for each in found] == [(KEY + where, says.format("tokenizer.json"))] * bool(where)
