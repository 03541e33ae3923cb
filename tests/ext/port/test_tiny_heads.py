"""A small copy of a model that has heads has them too: of the checkpoint's names, and llama.cpp runs them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from ext.file.conversion.checkpoints import VOCAB, write_tokenizer
from optional import needs
from places import TESTS
from typer.testing import CliRunner

from llamadiff.cli.app import app
from llamadiff.ext.file.safetensors_files import open_checkpoint
from llamadiff.ext.port.tiny import shrunk, tiny
from llamadiff.ext.port.tiny_heads import FILE, count_of, write_heads

pytestmark = [needs("torch", "transformers"), pytest.mark.filterwarnings("ignore")]

SIZES = {
    "vocab_size": VOCAB, "hidden_size": 640, "intermediate_size": 960, "num_hidden_layers": 12,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "bos_token_id": 1, "eos_token_id": 2,
    "num_experts_per_tok": 2, "moe_intermediate_size": 128, "tie_word_embeddings": False,
}  # fmt: skip
GLM = {**SIZES, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
       "topk_group": 1, "use_qk_norm": True}  # fmt: skip
QWEN = {**SIZES, "num_experts": 8, "shared_expert_intermediate_size": 128}
CONVERTER = f"""
import sys
sys.path[:0] = [{str(TESTS)!r}, {str(TESTS.parent)!r}, {str(TESTS.parent / "reference")!r}]
from pathlib import Path
from ext.port.glm_converter import convert
convert(Path(sys.argv[1]), Path(sys.argv[3]), *sys.argv[6:])
"""


def described(folder: Path, name: str, sizes: dict[str, object], **more: object) -> Path:
    """A checkpoint without weights."""
    import transformers

    folder.mkdir()
    config = getattr(transformers, f"{name}Config")(**sizes)
    about = {**json.loads(config.to_json_string(use_diff=False)), "architectures": [f"{name}ForCausalLM"], **more}
    (folder / "config.json").write_text(json.dumps(about), encoding="utf-8")
    write_tokenizer(folder)
    return folder


def heads_of(checkpoint: Path, folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the heads that are written for a checkpoint."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(checkpoint)
    small = shrunk(config.to_dict())
    folder.mkdir()
    assert write_heads(type(config), small, checkpoint, folder, 1) == count_of(small) > 0
    return {name: tuple(x.shape) for name, x in open_checkpoint(folder)[0].items()}


def test_heads_are_behind_the_layers(tmp_path):
    made = heads_of(described(tmp_path / "glm", "Glm4Moe", GLM, num_nextn_predict_layers=1), tmp_path / "heads")
    assert {name.split(".")[2] for name in made} == {"3"}
    joining = {name.removeprefix("model.layers.3."): shape for name, shape in made.items()}
    assert joining["eh_proj.weight"] == (72, 144)
    assert joining["enorm.weight"] == joining["shared_head.norm.weight"] == (72,)
    assert joining["embed_tokens.weight"] == joining["shared_head.head.weight"] == (VOCAB, 72)
    assert joining["mlp.experts.0.gate_proj.weight"] == (40, 72)


def test_tables_that_a_checkpoint_has_not_are_not_made(tmp_path):
    """A checkpoint with weights says which are its heads' own."""
    import torch
    from safetensors.torch import save_file

    checkpoint = described(tmp_path / "glm", "Glm4Moe", GLM, num_nextn_predict_layers=1)
    save_file({"model.layers.12.embed_tokens.weight": torch.zeros(1)}, checkpoint / "model.safetensors")
    made = heads_of(checkpoint, tmp_path / "heads")
    assert "model.layers.3.embed_tokens.weight" in made
    assert "model.layers.3.shared_head.head.weight" not in made


def test_heads_are_beside_the_layers(tmp_path):
    """Qwen3-Next's, of which config.json says nothing; its layer has full attention."""
    made = heads_of(described(tmp_path / "qwen", "Qwen3Next", QWEN), tmp_path / "heads")
    assert made["mtp.fc.weight"] == (72, 144)
    assert {"mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"} <= made.keys()
    assert "mtp.layers.0.self_attn.q_proj.weight" in made
    assert not [name for name in made if not name.startswith("mtp.") or "linear_attn" in name]


def test_a_model_without_heads_gets_none(tmp_path):
    checkpoint = described(tmp_path / "glm", "Glm4Moe", GLM, num_nextn_predict_layers=0)
    from transformers import AutoConfig

    small = shrunk(AutoConfig.from_pretrained(checkpoint).to_dict())
    assert write_heads(None, small, checkpoint, tmp_path, 1) == 0


def test_layers_without_experts_are_as_many_as_are_listed():
    kinds = ["dense"] * 3 + ["sparse"] * 9
    small = shrunk({**GLM, "mlp_layer_types": kinds, "first_k_dense_replace": 3})
    assert small["mlp_layer_types"] == [*["dense"] * 3, "sparse"]
    assert small["first_k_dense_replace"] == 3


def test_sections_of_rope_fit_what_is_rotated():
    rope = {"mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25}
    assert sum(shrunk({**QWEN, "rope_parameters": rope})["rope_parameters"]["mrope_section"]) == 16 * 0.25 / 2
    assert shrunk({**QWEN, "rope_parameters": rope})["rope_parameters"]["mrope_section"] == [1, 1, 0]  # no pair without
    whole = {"mrope_section": [16, 24, 24]}
    assert sum(shrunk({**QWEN, "rope_parameters": whole})["rope_parameters"]["mrope_section"]) == 8


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    return described(tmp_path_factory.mktemp("large") / "glm", "Glm4Moe", GLM, num_nextn_predict_layers=1)


def test_llama_cpp_runs_the_heads_of_a_small_copy(glm, tmp_path):
    (tmp_path / "convert.py").write_text(CONVERTER, encoding="utf-8")
    words = ["tiny", str(glm), "-o", str(tmp_path / "tiny"), "--converter", str(tmp_path / "convert.py")]
    ended = CliRunner().invoke(app, words)
    assert ended.exit_code == 0, ended.output
    said = " ".join(ended.output.split())
    assert "3 layers, 1 more for drafts" in said
    assert "llamadiff heads" in said
    model = str(tmp_path / "tiny/tiny.gguf")
    ended = CliRunner().invoke(app, ["heads", model, "--tokens", "5,17,9,80,42"])
    assert (ended.exit_code, ended.output.split()[0]) == (0, "MATCH"), ended.output
    ended = CliRunner().invoke(app, ["variants", model, "--tokens", "5,17,9,80,42", "--only", "mtp=2"])
    assert ended.exit_code == 0, ended.output
    assert "mtp=2                  MATCH  accepted" in ended.output


def test_a_converter_that_leaves_heads_out_is_said_so(glm, tmp_path):
    failing = tmp_path / "convert.py"
    failing.write_text(CONVERTER.replace("*sys.argv[6:]", "'without'"), encoding="utf-8")
    made = tiny(glm, tmp_path / "tiny", failing)
    assert (made.heads, made.converted) == (1, 0)
    words = ["tiny", str(glm), "-o", str(tmp_path / "again"), "--converter", str(failing)]
    assert "the converter left out what is for drafts (MTP)" in CliRunner().invoke(app, words).output


def test_heads_have_values_of_which_none_is_trivial(glm, tmp_path):
    from safetensors.numpy import load_file

    heads_of(glm, tmp_path / "heads")
    for name, x in load_file(tmp_path / "heads" / FILE).items():
        assert np.std(x) > 0 or name.endswith("e_score_correction_bias"), name
