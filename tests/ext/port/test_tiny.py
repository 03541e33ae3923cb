"""A small model of a checkpoint's config: its sizes, its file, and the recording of its own run."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from ext.file.conversion.checkpoints import MODELS, write_tokenizer
from optional import needs
from places import TESTS
from typer.testing import CliRunner

from llamadiff import UserError
from llamadiff.cli.app import app
from llamadiff.engines.run_spec import USUAL, Run
from llamadiff.ext.port.run import port
from llamadiff.ext.port.tiny import shrunk, tiny
from llamadiff.trace.reader import Trace
from llamadiff.verbs.check_traces import check_each

pytestmark = [needs("torch", "transformers"), pytest.mark.filterwarnings("ignore")]

CONVERTER = f"""
import sys
sys.path[:0] = [{str(TESTS)!r}, {str(TESTS.parent)!r}, {str(TESTS.parent / "reference")!r}]
from pathlib import Path
from ext.file.conversion.converter import convert
convert(Path(sys.argv[1]), "llama", Path(sys.argv[3]), "F32")
"""
LARGE = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_key_value_heads": 4,
    "num_hidden_layers": 48, "vocab_size": 320, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A checkpoint without weights."""
    import transformers

    folder = tmp_path_factory.mktemp("large")
    kind, _ = MODELS["llama"]
    config = getattr(transformers, f"{kind}Config")(**LARGE)
    config.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def converter(tmp_path_factory):
    path = tmp_path_factory.mktemp("converter") / "convert.py"
    path.write_text(CONVERTER, encoding="utf-8")
    return path


def test_sizes_are_small_and_groups_stay_groups():
    small = shrunk({**LARGE, "model_type": "llama", "head_dim": 64})
    assert small["hidden_size"] == small["num_attention_heads"] * small["head_dim"]
    assert (small["num_attention_heads"], small["num_key_value_heads"], small["num_hidden_layers"]) == (6, 2, 3)
    assert small["vocab_size"] == 320
    assert shrunk({**LARGE, "num_key_value_heads": 32})["num_key_value_heads"] == 6
    assert shrunk({**LARGE, "num_key_value_heads": 1})["num_key_value_heads"] == 1
    wide = shrunk({**LARGE, "head_dim": 128})
    assert wide["hidden_size"] != wide["num_attention_heads"] * wide["head_dim"]


def test_every_kind_of_layer_is_there():
    kinds = (["sliding"] * 5 + ["full"]) * 8
    small = shrunk({**LARGE, "layer_types": kinds, "sliding_window": 4096})
    assert small["layer_types"] == kinds[:6]
    assert (small["num_hidden_layers"], small["sliding_window"]) == (6, 8)


def test_no_two_sizes_are_alike():
    small = shrunk({**LARGE, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
                    "shared_expert_intermediate_size": 1024, "q_lora_rank": 768, "kv_lora_rank": 512,
                    "qk_rope_head_dim": 64, "v_head_dim": 128})  # fmt: skip
    sizes = [small[key] for key in ("hidden_size", "intermediate_size", "moe_intermediate_size", "q_lora_rank",
                                    "shared_expert_intermediate_size", "kv_lora_rank", "qk_rope_head_dim",
                                    "v_head_dim", "num_experts", "num_experts_per_tok", "vocab_size")]  # fmt: skip
    assert len(set(sizes)) == len(sizes)


def test_one_is_made_converted_and_recorded(large, converter, tmp_path):
    made = tiny(large, tmp_path / "tiny", converter, golden=True)
    assert made.layers == 3
    assert made.golden.stat().st_size < 10_000
    about = Trace.open(made.golden).info
    tokens = ",".join(map(str, about.tokens))
    assert port(made.gguf, str(made.folder), Run(tokens=about.tokens), USUAL).verdict == "match"
    ended = CliRunner().invoke(app, ["capture", str(made.gguf), "--tokens", tokens, "-o", str(tmp_path / "t.st")])
    assert ended.exit_code == 0
    [checked] = check_each([made.golden], None, USUAL, str(tmp_path / "t.st"))
    assert (checked.refused, checked.result.verdict) == ("", "match")


def test_another_seed_is_another_model(large, converter, tmp_path):
    first, second = (tiny(large, tmp_path / str(seed), converter, seed=seed) for seed in (1, 2))
    assert first.gguf.read_bytes() != second.gguf.read_bytes()


def test_what_cannot_be_made_is_said(large, converter, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").touch()
    with pytest.raises(UserError, match=r"is not empty; nothing that is there is overwritten, give --output .*-2"):
        tiny(large, tmp_path / "full", converter)
    with pytest.raises(UserError, match=r"no such file; give llama.cpp's convert_hf_to_gguf.py"):
        tiny(large, tmp_path / "a", tmp_path / "absent.py")
    failing = tmp_path / "failing.py"
    failing.write_text("raise SystemExit('this architecture is not known')", encoding="utf-8")
    with pytest.raises(UserError, match=r"made no file of .* this architecture is not known"):
        tiny(large, tmp_path / "b", failing)
    assert not (tmp_path / "b").exists()  # and does not stand in the way of the next try
    for said, remedy in (
        ("No module named 'sentencepiece.x'", "the converter needs it: .* -m pip install sentencepiece"),
        (
            f"chkhsh:  {'a' * 64}\n BPE pre-tokenizer was not recognized",
            f"chkhsh {'a' * 64}.*convert_hf_to_gguf_update",
        ),
    ):
        failing.write_text(f"raise SystemExit({said!r})", encoding="utf-8")
        with pytest.raises(UserError, match=remedy):
            tiny(large, tmp_path / "b", failing)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"cannot read its config.json"):
        tiny(tmp_path / "empty", tmp_path / "c", converter)
    (tmp_path / "odd").mkdir()
    about = json.loads((large / "config.json").read_text("utf-8"))
    (tmp_path / "odd/config.json").write_text(json.dumps({**about, "hidden_act": "none such"}), encoding="utf-8")
    with pytest.raises(UserError, match="cannot build a small model"):
        tiny(tmp_path / "odd", tmp_path / "d", converter)


def test_the_command_says_what_to_do_next(large, converter, tmp_path):
    words = ["tiny", str(large), "-o", str(tmp_path / "tiny"), "--converter", str(converter), "--golden"]
    ended = CliRunner().invoke(app, words)
    assert ended.exit_code == 0
    said = " ".join(ended.output.split())
    assert "Next: llamadiff port" in said
    line = next(line for line in ended.output.splitlines() if "llamadiff check" in line)
    _, _, golden, _, model, _, candidate = shlex.split(line)
    assert (Path(golden).is_file(), Path(model).is_file()) == (True, True)
    assert candidate == "cmd: ENGINE {model} {tokens} {out}"
    assert " ENGINE: what runs yours" in said
