"""A file against the checkpoint that it was made from: no finding; with a converter's mistake, that mistake named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from command import run
from ext.file.conversion.checkpoints import MODELS, VOCAB, make, write_tokenizer
from ext.file.conversion.converter import convert
from ext.file.conversion.mistakes import CASES, INJECTED
from models.gguf_file import read_gguf, write_gguf
from optional import needs

from llamadiff import UserError
from llamadiff.ext.file.opening import judge_weights
from llamadiff.ext.file.safetensors_files import INDEX

KINDS = ("F16", "Q8_0", "Q4_K_M")
pytestmark = needs("torch", "transformers")


def test_all_architectures_and_mistakes_are_tried():
    assert len(MODELS) == 10
    assert len({injected.cause for injected in INJECTED}) >= 12


@pytest.mark.parametrize("kind", ["F32", *KINDS])
@pytest.mark.parametrize("architecture", MODELS)
def test_a_right_conversion_has_no_finding(architecture, kind, checkpoint, tmp_path):
    folder = checkpoint(architecture)
    report = judge_weights(convert(folder, architecture, tmp_path / "m.gguf", kind), folder)
    assert report.oddities == ()
    assert report.verdict in ("match", "noise")
    assert all("llama.cpp assumes" in note or "(a tied head)" in note for note in report.notes)
    assert all(row.made for row in report.rows)
    assert all(row.distance.nmse <= 1.2 * row.cost + 1e-12 for row in report.rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("injected", "architecture"), CASES, ids=[f"{i.mistake}-{a}" for i, a in CASES])
def test_a_mistake_is_named_and_nothing_else(injected, architecture, kind, checkpoint, tmp_path):
    folder = checkpoint(architecture)
    report = judge_weights(convert(folder, architecture, tmp_path / "m.gguf", kind, injected.mistake), folder)
    assert {oddity.cause for oddity in report.findings} == {injected.cause}, report.summary
    assert any(injected.where in oddity.where for oddity in report.findings), report.summary
    assert report.verdict == "wrong"


def test_the_sentence_of_a_wrong_head_count(checkpoint, tmp_path):
    path = convert(checkpoint("llama"), "llama", tmp_path / "m.gguf", "Q4_K_M", "head-count")
    done = run("weights", path, checkpoint("llama"))
    assert done.returncode == 1
    text = " ".join(done.stdout.split())
    expected = "is permuted with 8 heads; the model has 2: Llama-type converters permute K by kv heads"
    assert f"blk.0.attn_k.weight: {expected}" in text
    line = next(line for line in done.stdout.splitlines() if line.startswith("blk.0.attn_q.weight"))
    assert "permuted by heads" in line


def test_fused_weights_are_legal(checkpoint, tmp_path):
    """llama.cpp's converter can put Q, K and V into one matrix; Q and K are permuted before."""
    folder = checkpoint("llama")
    fields, tensors = read_gguf(convert(folder, "llama", tmp_path / "split.gguf", "F32"))
    for i in range(2):
        parts = [tensors.pop(f"blk.{i}.attn_{part}.weight")[0] for part in "qkv"]
        tensors[f"blk.{i}.attn_qkv.weight"] = np.concatenate(parts)
    path = write_gguf(tmp_path / "m.gguf", fields, tensors)
    assert judge_weights(path, folder).findings == ()


def test_a_sharded_checkpoint_is_one(checkpoint, tmp_path):
    folder = make(tmp_path / "sharded", "qwen2", shard="1MB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    path = convert(folder, "qwen2", tmp_path / "m.gguf")
    assert judge_weights(path, folder).oddities == ()
    lost = sorted(folder.glob("*.safetensors"))[1]
    data = lost.read_bytes()
    lost.write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match=r"model-00002-of-.*ends at byte .* truncated"):
        judge_weights(path, folder)
    lost.unlink()
    with pytest.raises(UserError, match=f"the shard model-00002-of-.* that {INDEX} names is not there"):
        judge_weights(path, folder)
    (folder / INDEX).unlink()
    with pytest.raises(UserError, match="shards are there; download the others"):
        judge_weights(path, folder)


def test_a_tensor_that_is_in_one_side_alone_is_a_finding(checkpoint, tmp_path):
    from safetensors.numpy import load_file, save_file

    folder = tmp_path / "less"
    shutil.copytree(checkpoint("qwen2"), folder)
    path = convert(folder, "qwen2", tmp_path / "m.gguf")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.extra.weight"] = tensors.pop("model.layers.0.mlp.up_proj.weight")
    save_file(tensors, folder / "model.safetensors")
    found = {oddity.where: oddity.says for oddity in judge_weights(path, folder).findings}
    assert found["model.layers.0.extra.weight"] == "of the checkpoint is in no tensor of the file"
    assert found["blk.0.ffn_up.weight"] == "no tensor of less makes it"


def test_a_file_that_llama_cpp_does_not_load_is_wrong(checkpoint, tmp_path):
    path = convert(checkpoint("mamba2"), "mamba2", tmp_path / "m.gguf", "F32")
    assert judge_weights(path, checkpoint("mamba2"), load=True).findings == ()
    fields, tensors = read_gguf(path)
    for key, value in (("tokens", "<more>"), ("token_type", 1)):
        values, *types = fields[f"tokenizer.ggml.{key}"]
        fields[f"tokenizer.ggml.{key}"] = ([*values, value], *types)
    more = write_gguf(tmp_path / "more.gguf", fields, tensors, "mamba2")
    found = judge_weights(more, checkpoint("mamba2"), load=True).findings[-1]
    assert (found.where, found.cause) == ("llama.cpp", "unloadable")
    assert f"expected 256, {VOCAB + 1}, got 256, {VOCAB}" in found.says


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("rows", "times", "cause"), [(VOCAB, 1, ""), (VOCAB - 1, 1, "tied-head"), (VOCAB, 2, "tied-head")]
)
def test_a_head_that_is_the_embedding_once_more_may_be_left_out(rows, times, cause, tied, checkpoint, tmp_path):
    from safetensors.numpy import load_file, save_file

    folder = edited(checkpoint("qwen2"), tmp_path / "qwen2", tie_word_embeddings=tied)
    tensors = load_file(folder / "model.safetensors")
    head = times * tensors["model.embed_tokens.weight"][:rows]
    save_file({**tensors, "lm_head.weight": head}, folder / "model.safetensors")
    path = convert(checkpoint("qwen2"), "qwen2", tmp_path / "m.gguf", mistake="tied-head")
    found = judge_weights(path, folder).findings
    assert {oddity.cause for oddity in found} == {cause} - {""}


def edited(folder: Path, to: Path, **changes: object) -> Path:
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text("utf-8"))
    (to / "config.json").write_text(json.dumps({**config, **changes}), encoding="utf-8")
    return to


def test_keys_are_compared_one_by_one(checkpoint, tmp_path):
    path = convert(checkpoint("gemma2"), "gemma2", tmp_path / "m.gguf")
    other = edited(checkpoint("gemma2"), tmp_path / "c", sliding_window=64, final_logit_softcapping=15.0,
                   num_hidden_layers=3)  # fmt: skip
    found = {oddity.where: oddity.says for oddity in judge_weights(path, other).findings}
    assert found["gemma2.attention.sliding_window"] == "is 32; config.json has sliding_window = 64"
    assert found["gemma2.final_logit_softcapping"] == "is 30; config.json has final_logit_softcapping = 15"
    assert found["gemma2.block_count"] == "is 2; config.json has num_hidden_layers = 3"
    assert len(found) == 3


def test_tokenizers_that_differ(checkpoint, tmp_path):
    folder = tmp_path / "c"
    shutil.copytree(checkpoint("llama"), folder)
    path = convert(folder, "llama", tmp_path / "m.gguf")
    data = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    data["model"]["merges"] = data["model"]["merges"][:3]
    data["added_tokens"][0]["content"] = "<PAD>"
    (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    found = {oddity.where: oddity.says for oddity in judge_weights(path, folder).findings}
    assert "token 0 is '<pad>'; tokenizer.json has '<PAD>'" in found["tokenizer.ggml.tokens"]
    assert "in llama.cpp" in found["tokenizer"]
    shortest = found["tokenizer"].split("'")[1]
    assert 1 < len(shortest) <= 3


def test_a_special_token_that_became_a_normal_one(checkpoint, tmp_path):
    folder = tmp_path / "c"
    shutil.copytree(checkpoint("llama"), folder)
    path = convert(folder, "llama", tmp_path / "m.gguf")
    data = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    data["added_tokens"].append({**data["added_tokens"][2], "id": 50, "content": "!"})
    (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    report = judge_weights(path, folder)
    assert "special-token" in {oddity.cause for oddity in report.findings}


def test_a_tokenizer_that_adds_nothing(checkpoint, tmp_path):
    folder = tmp_path / "c"
    shutil.copytree(checkpoint("llama"), folder)
    path = convert(folder, "llama", tmp_path / "m.gguf")
    write_tokenizer(folder, add_bos=False)
    found = {oddity.where: oddity.says for oddity in judge_weights(path, folder).findings}
    assert found == {"tokenizer.ggml.add_bos_token": "is True; the checkpoint's tokenizer says False"}


BAD = {
    "no weights": ("model.safetensors", "no .safetensors weights"),
    "no config": ("config.json", "holds no checkpoint"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_directory_without_a_checkpoint(name, checkpoint, tmp_path):
    lost, words = BAD[name]
    folder = tmp_path / "c"
    shutil.copytree(checkpoint("qwen2"), folder)
    (folder / lost).unlink()
    path = convert(checkpoint("qwen2"), "qwen2", tmp_path / "m.gguf")
    done = run("weights", path, folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_other_bad_input(checkpoint, tmp_path):
    folder = checkpoint("qwen2")
    path = convert(folder, "qwen2", tmp_path / "m.gguf")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "config.json").write_text('{"model_type": "qwen2"}', encoding="utf-8")
    (tmp_path / "c" / "pytorch_model.bin").write_bytes(b"")
    cases = {
        (path, checkpoint("llama")): "model_type is 'llama'",
        (path, tmp_path / "c"): "pytorch_model.bin is pickled, which is never opened",
        (path, tmp_path / "nothing"): "no such file or directory",
    }
    for (model, other), words in cases.items():
        with pytest.raises(UserError, match=words):
            judge_weights(model, other)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3moe"])
def test_a_checkpoint_without_the_prefix_of_whole_models_is_one(architecture, checkpoint, tmp_path):
    from safetensors.numpy import load_file, save_file

    folder = tmp_path / "part"
    shutil.copytree(checkpoint(architecture), folder)
    path = convert(folder, architecture, tmp_path / "m.gguf")
    tensors = load_file(folder / "model.safetensors")
    named = {name.removeprefix("model.").removeprefix("transformer."): values for name, values in tensors.items()}
    assert named.keys() != tensors.keys()
    save_file(named, folder / "model.safetensors")
    assert judge_weights(path, folder).oddities == ()


@pytest.mark.parametrize("prefixes", [("language_model.", ""), ("model.text_model.", "model."), ("", "")])
def test_encoders_beside_a_language_model_are_no_part_of_its_file(prefixes, checkpoint, tmp_path):
    """Their tensors are an --mmproj file's; beside a model without a prefix nobody can tell them from its own."""
    from safetensors.numpy import load_file, save_file

    folder = tmp_path / "sees"
    shutil.copytree(checkpoint("qwen3"), folder)
    path = convert(folder, "qwen3", tmp_path / "m.gguf")
    ours, theirs = prefixes
    tensors = load_file(folder / "model.safetensors")
    named = {ours + (name.removeprefix("model.") if theirs else name): x for name, x in tensors.items()}
    encoder = {f"{theirs}vision_tower.encoder.layers.0.{name}.weight": np.ones((4, 4), np.float32) for name in "qk"}
    save_file({**named, **encoder}, folder / "model.safetensors")
    report = judge_weights(path, folder)
    assert [each.where for each in report.oddities] == ([] if ours else list(encoder)[::-1])
    says = "2 tensors of sees are not its language model's (vision_tower): a file for --mmproj has them"
    assert (says in report.notes) == bool(ours)
    if ours:
        lost = f"{ours}layers.0.extra.weight"
        save_file({**named, lost: np.ones((4, 4), np.float32)}, folder / "model.safetensors")
        assert [each.where for each in judge_weights(path, folder).findings] == ["model.layers.0.extra.weight"]
