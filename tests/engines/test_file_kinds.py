"""What a file is, is asked first: by every command in the same words, with what to do with it."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import pytest
from command import run
from llamaref import ModelError, Weights
from llamaref.file_kind import other_kind
from models import other_files
from models.gguf_file import finish
from models.small import write_model
from models.split import split_model
from optional import needs_slices

KINDS = {
    "adapter": (other_files.write_adapter, "a LoRA adapter", "llamadiff weights FILE MODEL"),
    "projector": (lambda path, _: other_files.write_projector(path), "a multimodal projector", "llamadiff watch"),
    "vocabulary": (lambda path, _: other_files.write_vocabulary(path), "a vocabulary alone", "llamadiff tokens FILE"),
    "importance": (lambda path, _: other_files.write_importance(path), "an importance matrix", "llama-quantize"),
    "control": (lambda path, _: other_files.write_control_vector(path), "a control vector", "give the model"),
}
COMMANDS = [
    ["compare", "{file}", "--tokens", "1,2"], ["backend", "{file}", "--tokens", "1,2"],
    ["variants", "{file}", "--tokens", "1,2"], ["capture", "{file}", "--tokens", "1,2", "-o", "{here}/t.safetensors"],
    ["taps", "{file}"], ["graph", "{file}"], ["compare", "{model}", "--tokens", "1,2", "--candidate", "{file}"],
    pytest.param(["weights", "{model}", "{file}"], marks=needs_slices("file")),
    pytest.param(["loss", "{file}", "{model}", "--tokens", "1,2"], marks=needs_slices("loss")),
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("m") / "m.gguf")


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[:2]))
@pytest.mark.parametrize("kind", KINDS)
def test_another_kind_of_file_is_named_with_what_to_do(kind, words, model, tmp_path):
    write, name, use = KINDS[kind]
    file = write(tmp_path / "other.gguf", model)
    if (kind, words[0]) == ("adapter", "weights"):
        return  # which says whether it fits: tests/ext/file/test_adapters.py
    done = run(*(word.format(file=file, model=model, here=tmp_path) for word in words))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert f"other.gguf: holds {name}" in done.stderr
    assert use in done.stderr


@needs_slices("file")
@pytest.mark.parametrize("kind", KINDS)
def test_its_tensors_can_be_looked_at(kind, model, tmp_path):
    write, name, _ = KINDS[kind]
    done = run("weights", write(tmp_path / "other.gguf", model))
    assert done.returncode == (2 if kind == "vocabulary" else 0), done.stdout  # which has none
    assert f"the file holds {name}" in " ".join(done.stdout.split())
    assert "suspicious" not in done.stdout


@pytest.mark.parametrize(
    ("fields", "names", "is_other"),
    [
        ({"general.architecture": "llama", "general.type": "model"}, ["token_embd.weight"], False),
        ({"general.architecture": "llama"}, ["token_embd.weight"], False),
        ({"general.architecture": "llama", "general.type": 7}, ["token_embd.weight"], False),
        ({"general.architecture": "llama"}, ["blk.0.attn_q.weight.lora_a"], True),
        ({"general.architecture": "llama", "tokenizer.ggml.tokens": ["a"]}, [], True),
        ({"general.architecture": "clip"}, ["v.patch_embd.weight"], True),
        ({"general.type": "adapter", "adapter.type": "control_vector"}, [], True),
    ],
)
def test_a_model_is_told_from_others_by_what_it_states(fields, names, is_other):
    assert (other_kind(fields, names) is not None) == is_other


# -- parts of a split -------------------------------------------------------------------------------------------------


def test_a_tensor_that_was_lost_is_named(tmp_path):
    first = split_model(tmp_path)
    second = tmp_path / "m-00002-of-00003.gguf"
    lost = _without(second, 4)
    with pytest.raises(ModelError, match=f"20 tensors .10, 9, 1. where it states 21: {lost} is in none; copy the part"):
        Weights(first)


def _without(part: Path, number: int) -> str:
    """A part without one of its tensors, whose name it is."""
    reader = gguf.GGUFReader(part)
    writer = gguf.GGUFWriter(part.with_suffix(".new"), "llama")
    for key, field in reader.fields.items():
        if key.startswith("split."):
            writer.add_key_value(key, field.contents(), field.types[0])
    lost = reader.tensors[number].name
    for tensor in reader.tensors:
        if tensor.name != lost:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)
    part.with_suffix(".new").replace(part)
    return lost


def test_parts_that_were_exchanged_are_named(tmp_path):
    first = split_model(tmp_path)
    shutil.copy(tmp_path / "m-00002-of-00003.gguf", tmp_path / "m-00003-of-00003.gguf")
    with pytest.raises(ModelError, match=r"m-00003-of-00003\.gguf: states that it is part 2; give each part its name"):
        Weights(first)
