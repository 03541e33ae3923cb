"""What besides tensors decides an output: each difference is named, and a right file has none."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from llamaref import Weights
from llamaref.known_tensors import usual_names
from models.gguf_file import write_gguf
from safetensors.numpy import save_file

from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.file.decides import module_oddities, routing_oddities
from llamadiff.ext.file.opening import judge_weights
from llamadiff.system.errors import UserError

SIGMOID, SOFTMAX = {"expert_gating_func": 2}, {"expert_gating_func": 1}


def model(path: Path, arch: str, fields: dict[str, object], tensors: tuple[str, ...] = ()) -> ModelFile:
    """A file of a few keys."""
    values = {name: np.ones((2, 2), np.float32) for name in ("token_embd.weight", *tensors)}
    floats = {f"{arch}.{key}": (value, 6) if isinstance(value, float) else value for key, value in fields.items()}
    return ModelFile(write_gguf(path / "m.gguf", floats, values, arch))


@pytest.mark.parametrize(
    ("arch", "fields", "config", "says"),
    [
        ("deepseek2", SIGMOID, {"scoring_func": "sigmoid"}, ""),
        ("deepseek2", {}, {"scoring_func": "softmax"}, ""),
        ("deepseek2", {}, {"scoring_func": "sigmoid"}, "is not in the file: llama.cpp takes softmax; config.json"),
        ("glm4moe", {}, {"text_config": {"scoring_func": "sigmoid"}}, ""),
        ("glm4moe", {}, {"score_func": "softmax"}, "is not in the file: llama.cpp takes sigmoid"),
        ("deepseek2", SOFTMAX, {"scoring_func": "sigmoid"}, "is softmax; config.json has scoring_func = sigmoid"),
        ("minimax-m2", {}, {"scoring_func": "sigmoid"}, ""),  # what llama.cpp then takes is not known
        ("qwen3moe", SIGMOID, {"scoring_func": "softmax"}, ""),  # it reads no such key
        ("deepseek2", {}, {"scoring_func": 7, "norm_topk_prob": None}, ""),
        ("dots1", {"expert_weights_norm": True}, {"norm_topk_prob": True}, ""),
        ("dots1", {}, {"norm_topk_prob": False, "routed_scaling_factor": 1.0}, ""),
        ("dots1", {}, {"norm_topk_prob": True}, "is not in the file: llama.cpp takes False; config.json has norm_topk"),
        ("dots1", {"expert_weights_scale": 2.5}, {"routed_scaling_factor": 2.5}, ""),
        ("dots1", {}, {"routed_scaling_factor": 2.5}, "is not in the file: llama.cpp takes 1.0; config.json has"),
        ("qwen3moe", {}, {"norm_topk_prob": True, "routed_scaling_factor": 2.5}, ""),
    ],
)  # fmt: skip
def test_how_experts_are_chosen(tmp_path, arch, fields, config, says):
    found = [*routing_oddities(model(tmp_path, arch, fields), config)]
    assert [each.says[: len(says)] for each in found] == ([says] if says else [])


POOL = "sentence_transformers.models."


def modules(folder: Path, *kinds: str, mode: str = "lasttoken") -> Path:
    """A checkpoint's modules, of which the second pools."""
    paths = [f"{number}_{kind}" if number else "" for number, kind in enumerate(kinds)]
    listed = [{"type": f"{POOL}{kind}", "path": path} for kind, path in zip(kinds, paths, strict=True)]
    (folder / "modules.json").write_text(json.dumps(listed), "utf-8")
    (folder / "1_Pooling").mkdir()
    config = {f"pooling_mode_{each}": each == mode for each in ("mean_tokens", "cls_token", "lasttoken")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config), "utf-8")
    return folder


@pytest.mark.parametrize(
    ("fields", "tensors", "mode", "dense", "says"),
    [
        ({"pooling_type": 3}, (), "lasttoken", 0, []),
        ({"pooling_type": 1}, ("dense_2.weight",), "mean_tokens", 1, []),
        ({"pooling_type": 2}, (), "max_tokens", 0, []),  # which llama.cpp does not know
        ({"pooling_type": 1}, (), "lasttoken", 0, ["is mean; 1_Pooling/config.json has last token"]),
        ({}, (), "cls_token", 0,
         ["is not in the file: llama.cpp pools nothing; 1_Pooling/config.json has first token"]),
        ({"pooling_type": 3}, ("dense_2.weight",), "lasttoken", 2,
         ["is missing: 3_Dense of the checkpoint multiplies the pooled vector by a matrix"]),
    ],
)  # fmt: skip
def test_how_a_vector_is_made(tmp_path, fields, tensors, mode, dense, says):
    folder = modules(tmp_path, "Transformer", "Pooling", *["Dense"] * dense, mode=mode)
    assert [each.says for each in module_oddities(model(tmp_path, "llama", fields, tensors), folder)] == says


@pytest.mark.parametrize(("mode", "count"), [("mean", 0), ("lasttoken", 1), ("max", 0)])
def test_the_newer_form_of_a_pooling(tmp_path, mode, count):
    folder = modules(tmp_path, "Transformer", "Pooling")
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": mode}), "utf-8")
    assert len([*module_oddities(model(tmp_path, "llama", {"pooling_type": 1}), folder)]) == count


def test_modules_elsewhere_are_not_read(tmp_path):
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "x.Pooling", "path": "../.."}]), "utf-8")
    assert not [*module_oddities(model(tmp_path, "llama", {}), tmp_path)]
    (tmp_path / "modules.json").write_text("[3]", "utf-8")
    with pytest.raises(UserError, match=r"expected a list of modules"):
        [*module_oddities(model(tmp_path, "llama", {}), tmp_path)]


def test_keys_are_compared_where_no_table_knows_the_tensors(tmp_path):
    file = model(tmp_path, "deepseek2", {})
    folder = modules(tmp_path, "Transformer", "Pooling")
    for config, verdict in (({"scoring_func": "softmax"}, "wrong"), ({}, "wrong")):
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
        report = judge_weights(file.path, folder)
        assert (report.verdict, [each.cause for each in report.findings]) == (verdict, ["pooling"])
    (folder / "modules.json").unlink()
    report = judge_weights(file.path, folder)
    assert (report.verdict, report.findings) == ("unchecked", ())
    assert "no table says how deepseek2's tensors are converted" in report.notes[0]


@pytest.mark.parametrize(
    ("spoil", "verdict", "says"),
    [
        (None, "match", ""),
        ("model.layers.0.self_attn.v_proj.weight", "match", ""),  # its rows are reordered, as some converters do
        ("model.layers.1.mlp.up_proj.weight", "wrong", "1.25"),
        ("model.norm.weight", "wrong", "value 0 should be value 255"),
    ],
)
def test_tensors_are_found_by_the_converters_names_where_no_table_knows_them(
    small_model, tmp_path, spoil, verdict, says
):
    file = small_model("granite", "Q8_0")
    folder = checkpoint_of(file, tmp_path, spoil)
    report = judge_weights(file, folder)
    assert report.verdict == verdict, report.findings
    assert not report.unchecked
    assert [each.says for each in report.findings if says not in each.says] == []


def checkpoint_of(file, folder, spoil):
    """A directory with a file's tensors, under the names of Hugging Face's, Q and K in halves; one is changed."""
    weights, tensors = Weights(file), {}
    usual = usual_names("granite", 2)
    layer = ("input_layernorm", "post_attention_layernorm", *(f"self_attn.{x}_proj" for x in "qkvo"),
             *(f"mlp.{x}_proj" for x in ("gate", "up", "down")))  # fmt: skip
    names = ["model.embed_tokens", "model.norm", "lm_head", *(f"model.layers.{i}.{x}" for i in (0, 1) for x in layer)]
    for name in (f"{each}.weight" for each in names):
        values = weights.whole(usual(name)).copy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = values.reshape(-1, 32, 2, 256).swapaxes(1, 2).reshape(values.shape).copy()
        if name == spoil:
            values = values / 1.25 if "mlp" in name else values[::-1].copy()
        tensors[name] = values
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "granite"}), "utf-8")
    return folder
