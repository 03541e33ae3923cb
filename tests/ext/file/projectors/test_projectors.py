"""A projector file against its checkpoint: a right one has no finding; a mistake is named, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
import pytest
from command import run
from ext.file.projectors.pairs import PAIRS, Pair, permuted
from optional import needs

from llamadiff import UserError
from llamadiff.ext.file.opening import judge_weights

pytestmark = needs("safetensors")
AGAIN = "convert mmproj.gguf again"


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
@pytest.mark.parametrize("name", PAIRS)
def test_a_right_conversion_has_no_finding(name, kind, tmp_path):
    report = judge_weights(*PAIRS[name]().written(tmp_path, kind))
    assert report.oddities == ()
    assert report.verdict == ("match" if kind == "F32" else "noise")
    assert all(row.made for row in report.rows)


@pytest.mark.parametrize("name", PAIRS)
def test_of_an_unknown_projector_nothing_right_is_wrong(name, tmp_path):
    """Names and values are all that is known of it: what the table says of the projector is not."""
    pair = PAIRS[name]()
    pair.config["model_type"] = "hears_and_sees"
    for part in ("vision_config", "audio_config"):
        pair.config.get(part, {}).pop("model_type", None)
    pair.keys["clip.projector_type"] = "another"
    report = judge_weights(*pair.written(tmp_path))
    assert report.findings == ()
    assert report.verdict == "match"
    assert any("it is not known what converters do for the projector another" in note for note in report.notes)


def _exchange(a: str, b: str) -> Callable[[Pair], None]:
    def change(pair: Pair) -> None:
        pair.tensors[a], pair.tensors[b] = pair.tensors[b], pair.tensors[a]

    return change


def _values(name: str, change: Callable) -> Callable[[Pair], None]:
    def changed(pair: Pair) -> None:
        pair.tensors[name] = np.ascontiguousarray(change(pair.tensors[name])).reshape(pair.tensors[name].shape)

    return changed


def _lost(*ends: str) -> Callable[[Pair], None]:
    def change(pair: Pair) -> None:
        pair.tensors = {name: values for name, values in pair.tensors.items() if not name.endswith(ends)}

    return change


def _key(key: str, value: object) -> Callable[[Pair], None]:
    def change(pair: Pair) -> None:
        if value is None:
            pair.keys.pop(f"clip.{key}")
        else:
            pair.keys[f"clip.{key}"] = value

    return change


def _coarse(pair: Pair) -> None:
    kind = gguf.GGMLQuantizationType.Q4_0
    name = "v.blk.1.ffn_up.weight"
    pair.tensors[name] = gguf.quants.dequantize(gguf.quants.quantize(pair.tensors[name], kind), kind)


Q, K = "v.blk.0.attn_q.weight", "v.blk.0.attn_k.weight"
OUT, PATCHES = "v.blk.1.attn_out.weight", "v.patch_embd.weight"
MISTAKES = [
    ("gemma3", _exchange(Q, K), {Q: "k_proj.weight, which v.blk.0.attn_k.weight", K: "q_proj.weight, which"}),
    ("qwen2vl", _exchange(Q, K), {Q: "attn.qkv.weight, its K, which", K: "attn.qkv.weight, its Q, which"}),
    ("qwen2vl", _exchange("v.blk.0.ln1.weight", "v.blk.0.ln2.weight"),
     {"v.blk.0.ln1.weight": "norm2.weight, which", "v.blk.0.ln2.weight": "norm1.weight, which"}),
    ("qwen2vl", _exchange(PATCHES, "v.patch_embd.weight.1"),
     {PATCHES: "its frame 1, which", "v.patch_embd.weight.1": "its frame 0, which"}),
    ("qwen3vl", _exchange("v.deepstack.0.fc1.weight", "v.deepstack.2.fc1.weight"),
     {"v.deepstack.0.fc1.weight": "deepstack_merger_list.1.linear_fc1.weight, which",
      "v.deepstack.2.fc1.weight": "deepstack_merger_list.0.linear_fc1.weight, which"}),
    ("pixtral", _exchange("mm.1.weight", "mm.2.weight"), {"mm.1.weight": "linear_2", "mm.2.weight": "linear_1"}),
    ("llava", _exchange("mm.0.weight", "mm.2.weight"), {"mm.0.weight": "linear_2", "mm.2.weight": "linear_1"}),
    ("gemma3", _lost("blk.1.attn_q.bias"), {"v.blk.1.attn_q.bias": "is missing: vision_tower.vision_model"}),
    ("qwen2vl", _lost("blk.1.attn_q.bias"), {"v.blk.1.attn_q.bias": "attn.qkv.bias, its Q of ck is in no tensor"}),
    ("pixtral", _lost("img_break"), {"v.token_embd.img_break": "that is [IMG_BREAK]'s; llama.cpp refuses the file"}),
    ("qwen2vl", _lost("weight.1"), {"v.patch_embd.weight.1": "its frame 1 of ck is in no tensor"}),
    ("llava", _lost("pre_ln.weight", "pre_ln.bias"),
     {"v.pre_ln.weight": "does without it, or refuses the file", "v.pre_ln.bias": "adds nothing there"}),
    ("ultravox", _lost("blk.0.ffn_down.bias"), {"a.blk.0.ffn_down.bias": "layers.0.fc2.bias of ck is in no tensor"}),
    ("gemma3", _values(OUT, lambda x: np.roll(x, 1, 0)), {OUT: "the rows are rolled: each is 1 place later"}),
    ("gemma3", _values(Q, permuted), {Q: "is permuted with 4 heads; converters permute nothing of gemma3"}),
    ("pixtral", _values(Q, permuted), {Q: "is permuted twice by 4 heads"}),
    ("gemma3", _values(PATCHES, lambda x: x.swapaxes(2, 3)), {PATCHES: "outputs x channels x columns x rows; outputs"}),
    ("gemma3", _values(PATCHES, lambda x: x.transpose(0, 2, 3, 1)), {PATCHES: "outputs x rows x columns x channels"}),
    ("qwen2vl", _values(PATCHES, lambda x: x[:, ::-1]), {PATCHES: "channels are in reverse order: blue, green, red"}),
    ("gemma3", _values(PATCHES, lambda x: x[:, :, ::-1, ::-1]), {PATCHES: "its rows and columns are in reverse order"}),
    ("gemma3", _values("v.blk.0.ffn_up.bias", lambda x: 2 * x), {"v.blk.0.ffn_up.bias": "is multiplied by 2"}),
    ("gemma3", _key("has_vision_encoder", False),
     {"clip.has_vision_encoder": "llama.cpp then loads none of its v.* tensors"}),
    ("qwen2vl", _values("mm.0.weight", lambda x: x.reshape(256, 2, 2, 64).swapaxes(1, 2)),
     {"mm.0.weight": "blocks of 64 columns 1 and 2 are swapped"}),
    ("gemma3", _values(OUT, lambda x: x.T), {OUT: "is transposed: its rows should be its columns"}),
    ("ultravox", _values("a.conv1d.2.weight", lambda x: x.swapaxes(0, 1)),
     {"a.conv1d.2.weight": "channels x outputs x steps; outputs x channels x steps"}),
    ("gemma3", _values("mm.soft_emb_norm.weight", lambda x: x - 1), {"mm.soft_emb_norm.weight": "one is not added"}),
    ("gemma3", _values("v.blk.0.ln1.weight", lambda x: x + 1), {"v.blk.0.ln1.weight": "one is added"}),
    ("gemma3", _values("v.position_embd.weight", lambda x: np.roll(x, 1, 0)),
     {"v.position_embd.weight": "the rows are rolled"}),
    ("gemma3", _coarse, {"v.blk.1.ffn_up.weight": "was quantized before: these are Q4_0's values, stored as F32"}),
    ("gemma3", _key("vision.attention.layer_norm_epsilon", 1e-3),
     {"clip.vision.attention.layer_norm_epsilon": "is 0.001; transformers' default says 1e-06"}),
    ("gemma3", _key("vision.image_mean", [0.48, 0.46, 0.41]), {"clip.vision.image_mean": "the processor's image_mean"}),
    ("gemma3", _key("vision.attention.head_count", 8), {"clip.vision.attention.head_count": "is 8; config.json"}),
    ("gemma3", _key("vision.projector.scale_factor", None),
     {"clip.vision.projector.scale_factor": "is not in the file: llama.cpp takes 4; config.json"}),
    ("gemma3", _key("use_gelu", None), {"clip.use_gelu": "quick GELU is computed then"}),
    ("pixtral", _key("use_silu", None), {"clip.use_silu": "hidden_act = silu says True"}),
    ("gemma3", _key("projector_type", "mlp"), {"clip.projector_type": "model_type is gemma3: gemma3 is right"}),
    ("ultravox", _key("audio.projector.stack_factor", 4), {"clip.audio.projector.stack_factor": "is 4; config.json"}),
    ("ultravox", _key("audio.num_mel_bins", 128), {"clip.audio.num_mel_bins": "num_mel_bins says 80"}),
    ("qwen2vl", _key("vision.image_std", None), {"clip.vision.image_std": "llama.cpp does not do without it"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "mistake", "says"), MISTAKES, ids=[f"{m[0]}-{next(iter(m[2]))}" for m in MISTAKES])
def test_a_mistake_is_named_and_nothing_else(name, mistake, says, tmp_path):
    pair = PAIRS[name]()
    mistake(pair)
    report = judge_weights(*pair.written(tmp_path))
    assert report.verdict == "wrong"
    assert {each.where for each in report.oddities} == {*says}, report.summary
    for each in report.findings:
        assert says[each.where] in each.says
        assert each.says.endswith(AGAIN)


def test_q_k_and_v_that_are_cut_head_by_head(tmp_path):
    pair = PAIRS["qwen2vl"]()
    by_heads = (
        pair.checkpoint["visual.blocks.1.attn.qkv.weight"].reshape(4, 3, 16, 64).swapaxes(0, 1).reshape(3, 64, 64)
    )
    pair.tensors |= {f"v.blk.1.attn_{letter}.weight": part for letter, part in zip("qkv", by_heads, strict=True)}
    report = judge_weights(*pair.written(tmp_path))
    assert {each.where for each in report.findings} == {f"v.blk.1.attn_{letter}.weight" for letter in "qkv"}
    assert all("is cut head by head; visual.blocks.1.attn.qkv.weight holds" in each.says for each in report.findings)


def test_positions_of_another_size_are_one_finding(tmp_path):
    pair = PAIRS["gemma3"]()
    pair.tensors["v.position_embd.weight"] = pair.tensors["v.position_embd.weight"][:9]
    (found,) = judge_weights(*pair.written(tmp_path)).findings
    assert found.says.startswith("has shape [9, 64]; vision_tower.vision_model.embeddings.position_embedding.weight")


def test_another_layers_tensor_is_named_in_each_type(tmp_path):
    for kind in ("F16", "Q8_0"):
        pair = PAIRS["qwen2vl"]()
        pair.tensors["v.blk.2.ffn_down.weight"] = pair.tensors["v.blk.1.ffn_down.weight"]
        (found,) = judge_weights(*pair.written(tmp_path, kind)).findings
        assert found.where == "v.blk.2.ffn_down.weight"
        assert "these are the values of visual.blocks.1.mlp.fc2.weight" in found.says


def test_of_an_unknown_projector_a_layer_that_others_contradict_is_wrong(tmp_path):
    pair = PAIRS["pixtral"]()
    pair.config |= {"model_type": "another"}
    pair.config["vision_config"].pop("model_type")
    pair.keys["clip.projector_type"] = "another"
    pair.tensors[Q] = pair.checkpoint["vision_tower.transformer.layers.0.attention.q_proj.weight"]
    (found,) = judge_weights(*pair.written(tmp_path)).findings
    assert (found.where, found.cause) == (Q, "permutation-missing")


def test_a_checkpoint_of_a_language_model_is_refused_in_one_line(tmp_path):
    from safetensors.numpy import save_file

    path, folder = PAIRS["gemma3"]().written(tmp_path)
    save_file({"model.layers.0.mlp.up_proj.weight": np.ones((4, 4), np.float32)}, folder / "model.safetensors")
    with pytest.raises(UserError, match="has the tensors of a language model alone, mmproj"):
        judge_weights(path, folder)


def test_the_command_says_what_to_do(tmp_path):
    pair = PAIRS["gemma3"]()
    _lost("blk.1.attn_q.bias")(pair)
    done = run("weights", *pair.written(tmp_path))
    assert done.returncode == 1
    assert f"llama.cpp adds nothing there; {AGAIN}" in " ".join(done.stdout.split())
