"""A checkpoint's own code against llama.cpp's graph: right ports are right, and mistakes are found where they are.

The checkpoints are transformers', small and random; a converter of the tests' own writes their files, with mistakes.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from ext.file.conversion.checkpoints import MODELS, make
from ext.file.conversion.converter import convert
from ext.file.conversion.mistakes import INJECTED
from llamaref.known_tensors import usual_names
from models.gguf_file import read_gguf, write_gguf
from models.other_files import merged, write_adapter
from optional import needs
from typer.testing import CliRunner

from llamadiff import UserError
from llamadiff.cli.app import app
from llamadiff.engines.model_file import ModelFile
from llamadiff.engines.run_spec import USUAL, Run
from llamadiff.ext.file.opening import judge_weights
from llamadiff.ext.graph.engine import Then
from llamadiff.ext.graph.model import by_its_graph
from llamadiff.ext.port import lineup
from llamadiff.ext.port import run as verb
from llamadiff.ext.port.graph_values import Again, node_values
from llamadiff.ext.port.loading import kept_as_in
from llamadiff.ext.port.page import headline
from llamadiff.ext.port.run import port
from llamadiff.ext.port.sides import FILE, GRAPH, UNSURE, Blame, uneven
from llamadiff.ext.port.torch_ops import is_read
from llamadiff.llamacpp.request import Settings
from llamadiff.trace.reader import Trace
from llamadiff.verbs.verbs import compare

pytestmark = [needs("torch", "transformers"), pytest.mark.filterwarnings("ignore")]
TOKENS = (1, 7, 45, 99, 13, 200, 33, 61, 5, 150, 77, 42)
RIGHT = [arch for arch in MODELS if arch != "phi3"]  # the converter leaves out LongRoPE's factor of attention


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """architecture -> its checkpoint, made once."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return cache(lambda arch: make(folder / arch, arch))


@pytest.fixture
def ported(checkpoint, tmp_path):
    """What is found of a conversion, with a mistake or without."""

    def found(arch, mistake=None, kind="F32"):
        path = convert(checkpoint(arch), arch, tmp_path / "m.gguf", kind, mistake)
        return port(path, str(checkpoint(arch)), Run(tokens=TOKENS), USUAL)

    return found


@pytest.mark.parametrize("arch", RIGHT)
def test_a_right_port_is_right(arch, ported):
    found = ported(arch)
    assert found.verdict == "match", [place.name for place in found.places]
    assert found.lineup.aligned + found.lineup.inside == found.lineup.nodes
    assert found.lineup.aligned > 0.5 * found.lineup.nodes
    assert found.logits < 1e-11


@pytest.mark.parametrize("arch", ["llama", "gpt2", "mamba2"])  # whose convolutions stay in float32
def test_a_file_in_16_bits_is_right(arch, ported):
    assert ported(arch, kind="F16").verdict == "match"


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
@pytest.mark.parametrize("arch", ["llama", "gpt2", "qwen3moe", "mamba2"])
def test_a_quantized_file_is_right_within_its_quantization(arch, kind, ported):
    found = ported(arch, kind=kind)
    assert (found.verdict, list(found.quantized)) == ("match", [kind])
    assert found.logits < 1e-11


@pytest.mark.parametrize("arch", ["llama", "qwen3moe"])
@pytest.mark.parametrize(
    ("mistake", "says"), [("rope-base", "uses base"), ("gate-up-swapped", "applies the activation")]
)
def test_a_mistake_in_a_quantized_file_is_found(mistake, says, arch, ported):
    found = ported(arch, mistake, "Q4_K")
    assert [place.side for place in found.places] == ["the file"]
    assert found.places[0].says.startswith(says)


# mistake, architecture: the op, the layers, and what the model does in the words of the report
MISTAKES = {
    ("rope-base", "qwen2"): ("ROPE Qcur_rope and Kcur_rope", "uses base 1e+06, where llama.cpp has 10000"),
    ("permutation-missing", "llama"): ("ROPE Qcur_rope and Kcur_rope", "rotates (i, i+16); llama.cpp's graph needs"),
    ("epsilon", "qwen3"): ("RMS_NORM norm", "uses epsilon 1e-06, where llama.cpp has 0.001"),
    ("epsilon", "stablelm"): ("NORM norm", "uses epsilon 1e-05, where llama.cpp has 0.001"),
    ("plus-one-twice", "gemma3"): ("MUL attn_norm", "multiplies by blk.{i}.attn_norm.weight - 1"),
    ("gate-up-swapped", "gemma2"): ("GEGLU ffn_geglu", "applies the activation to up"),
    ("transposed", "gpt2"): ("MUL_MAT", "as if it were stored [in, out]"),
    ("rope-scaling", "qwen3moe"): ("ROPE Qcur_rope and Kcur_rope", "divides positions by 4, where llama.cpp has 1"),
    ("exp-missing", "mamba2"): ("SSM_SCAN", "takes -exp of blk.{i}.ssm_a"),
    ("tied-head", "llama"): (
        "MUL_MAT result_output",
        "has lm_head.weight where llama.cpp's graph has token_embd.weight",
    ),
}


@pytest.mark.parametrize(("mistake", "arch"), MISTAKES)
def test_a_mistake_of_a_converter_is_found_at_its_op(mistake, arch, ported):
    op, says = MISTAKES[mistake, arch]
    found = ported(arch, mistake)
    assert found.verdict == "wrong"
    assert found.places[0].name.split(",")[0] == op
    assert says in found.places[0].says
    assert found.places[0].reads or found.places[0].line


def erring(monkeypatch, labels):
    """llama.cpp's graph, in which nodes give more or less than they should."""

    def altered(graph):
        numbers = {graph.labelled[label].number: factor for label, factor in labels.items()}
        return {number: Then(lambda x, by=by: x * np.float32(by)) for number, by in numbers.items()}

    class Erring(Again):
        def following(self, values, changed, nodes, more=None):
            after = {*changed, *(more or {})}
            for node in nodes:
                after |= {node.number} if after & set(self.graph.reads(node)) else set()
            own = {number: by for number, by in altered(self.graph).items() if number in after}
            return super().following(values, changed, nodes, {**own, **(more or {})})

    monkeypatch.setattr(verb, "node_values", lambda graph, weights: node_values(graph, weights, altered(graph)))
    monkeypatch.setattr(lineup, "Again", Erring)


def test_three_mistakes_are_three_places(monkeypatch, ported):
    erring(monkeypatch, {"kq_soft_max-0": 0.9, "ffn_swiglu-0": 1.1, "ffn_norm-1": 1.2})
    found = ported("llama")
    assert [place.name for place in found.places] == [
        "SOFT_MAX kq_soft_max, layer 0", "SWIGLU ffn_swiglu, layer 0", "MUL ffn_norm, layer 1",
    ]  # fmt: skip
    assert [round(place.error, 3) for place in found.places] == [0.01, 0.01, 0.04]
    assert [place.line.file for place in found.places] == [
        "modeling_llama.py",
        "modeling_llama.py",
        "modeling_llama.py",
    ]


@pytest.mark.parametrize("arch", ["llama", "gemma2", "mamba2", "gpt2"])
@pytest.mark.parametrize("label", ["l_out-0", "result_norm", "result_output"])
def test_what_ends_a_layer_or_the_model_is_found(label, arch, monkeypatch, ported):
    erring(monkeypatch, {label: 1.01})
    found = ported(arch)
    fused = arch == "gpt2" and label == "result_norm"  # torch has one op for the norm, its weight and its bias
    assert [[node.label for node in place.nodes] for place in found.places] == [["norm_w" if fused else label]]


def test_an_error_of_a_thousandth_is_found(monkeypatch, ported):
    erring(monkeypatch, {"attn_norm-1": 1 + 1e-4})
    assert [place.name for place in ported("qwen2").places] == ["MUL attn_norm, layer 1"]


# What shows in no value of these tokens, or is refused by llama.cpp.
UNSEEN = {
    ("rope-base", "gemma3"), ("rope-scaling", "gemma3"), ("tied-head", "stablelm"),
    *(("transposed", arch) for arch in ("qwen3", "gemma2", "gemma3", "qwen3moe", "mamba2")),
}  # fmt: skip
INJECTIONS = [
    (each.mistake, arch) for each in INJECTED for arch in sorted(each.architectures)
    if arch in RIGHT and each.mistake != "bos-flag" and (each.mistake, arch) not in UNSEEN
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("mistake", "arch"), INJECTIONS)
def test_every_mistake_of_a_converter_is_the_files(mistake, arch, ported):
    found = ported(arch, mistake)
    assert found.verdict == "wrong"
    assert {place.side for place in found.places} == {"the file"}
    assert found.lineup.mended[0] == found.lineup.mended[1]


OTHERWISE = """
import torch, transformers
def model():
    return transformers.AutoModelForCausalLM.from_pretrained({folder!r}, attn_implementation="eager")
class Norm(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(size) + 0.5)
    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
def norm_of_q():
    made = model()
    for layer in made.model.layers:
        own = layer.self_attn.q_proj
        layer.self_attn.q_proj = torch.nn.Sequential(own, Norm(own.out_features))
    return made
def bias_of_v():
    made = model()
    for layer in made.model.layers:
        layer.self_attn.v_proj.bias = torch.nn.Parameter(torch.randn(layer.self_attn.v_proj.out_features))
    return made
def no_norm():
    made = model()
    for layer in made.model.layers:
        layer.post_attention_layernorm = torch.nn.Identity()
    return made
def scaled():
    made = model()
    for layer in made.model.layers:
        layer.mlp.down_proj.register_forward_hook(lambda _, __, out: out * torch.sigmoid(out))
    return made
def fewer():
    made = model()
    for layer in made.model.layers:
        layer.mlp.gate.top_k = 1
    return made
def several():
    made = norm_of_q()
    for layer in made.model.layers:
        layer.mlp.up_proj.bias = torch.nn.Parameter(torch.randn(layer.mlp.up_proj.out_features))
    made.lm_head.weight = torch.nn.Parameter(made.lm_head.weight * 1.5)
    return made
"""


@pytest.fixture
def otherwise(checkpoint, tmp_path):
    """What is found of a right file, of a model whose code does something else than llama.cpp's graph."""

    def found(function, arch="llama"):
        path = convert(checkpoint(arch), arch, tmp_path / "m.gguf", "F32")
        (tmp_path / "mine.py").write_text(OTHERWISE.format(folder=str(checkpoint(arch))), encoding="utf-8")
        return port(path, f"{tmp_path / 'mine.py'}:{function}", Run(tokens=TOKENS), USUAL)

    return found


@pytest.mark.parametrize(
    ("function", "arch", "name", "says"),
    [
        ("norm_of_q", "llama", "ROPE Qcur_rope, layers 0, 1", r"computes .*rsqrt.* of Qcur_proj first \(mine.py:\d+\)"),
        ("bias_of_v", "llama", "MUL_MAT Vcur_proj, layers 0, 1", r"adds model.layers.\{i\}.self_attn.v_proj.bias"),
        ("no_norm", "llama", "RMS_NORM norm, layers 0, 1", "leaves this out, and goes on with its input"),
        ("scaled", "llama", "ADD l_out, layers 0, 1", r"computes .*sigmoid, mul of ffn_out first \(mine.py:\d+\)"),
        ("fewer", "qwen3moe", "ARGSORT ffn_moe_argsort, layers 0, 1", "chooses 1 experts.*llama.cpp's graph 2"),
    ],
)
def test_what_a_graph_lacks_or_has_too_much_is_said(function, arch, name, says, otherwise):
    found = otherwise(function, arch)
    assert [place.name for place in found.places] == [name]
    assert re.match(says, found.places[0].says), found.places[0].says
    lacks = function == "bias_of_v"  # a parameter that no tensor of the file has
    assert found.places[0].side == ("the file" if lacks else "the file, or the model's code")


def test_several_things_are_said_one_by_one(otherwise):
    found = otherwise("several")
    assert [place.name for place in found.places] == [
        "ROPE Qcur_rope, layers 0, 1", "MUL_MAT ffn_up, layers 0, 1", "MUL_MAT result_output",
    ]  # fmt: skip
    assert found.lineup.mended == (3, 3)


# -- the command ---------------------------------------------------------------------------------------------------


def command(*arguments):
    return CliRunner().invoke(app, ["port", *map(str, arguments), "--tokens", ",".join(map(str, TOKENS))])


def test_the_command_names_both_sides(checkpoint, tmp_path):
    path = convert(checkpoint("llama"), "llama", tmp_path / "m.gguf", "F32", "rope-base")
    ended = command(path, checkpoint("llama"), "-o", f"json:{tmp_path / 'r.json'}")
    assert ended.exit_code == 1
    assert "uses base 500000, where llama.cpp has 10000" in " ".join(ended.output.split())
    assert "modeling_llama.py:" in ended.output
    about = json.loads((tmp_path / "r.json").read_text("utf-8"))
    assert (about["verdict"], about["places"][0]["nodes"][0]) == ("wrong", "Qcur_rope-0")
    assert about["places"][0]["cause"]["name"] == "rope-base"


@pytest.mark.parametrize("arch", ["llama", "mamba2"])
def test_decode_steps_are_held_against_one_pass(arch, checkpoint, tmp_path):
    path = convert(checkpoint(arch), arch, tmp_path / "m.gguf", "F32", None)
    args = ["port", str(path), str(checkpoint(arch)), "--tokens", "1,7,45,99", "--n-predict", "3"]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    assert re.search(r"llama\.cpp ran 3 tokens as decode steps: every\s+op", result.output)


def test_a_wrong_decode_step_is_found(checkpoint, monkeypatch, tmp_path):
    def forgetful(*args):
        graph, trace = by_its_graph(*args)
        arrays = {name: trace[name].copy() for name in trace}
        arrays["kqv_out-1"][-1] = arrays["kqv_out-1"][0]  # the last step has forgotten all but the first token
        return graph, Trace(trace.info, arrays, trace.dtypes)

    monkeypatch.setattr(verb, "by_its_graph", forgetful)
    path = convert(checkpoint("llama"), "llama", tmp_path / "m.gguf", "F32", None)
    found = port(path, str(checkpoint("llama")), Run(tokens=TOKENS[:6], n_predict=2), USUAL)
    assert (found.verdict, found.places) == ("wrong", [])
    assert found.steps.first_divergence.tap == "kqv_out-1"
    assert "not its decode steps: llama.cpp's weighted sum of values, layer 1" in headline(found)


@pytest.mark.parametrize(
    ("arch", "mistake", "fault"),
    [
        ("qwen3", None, ""),
        ("qwen3", "epsilon", "qwen3.attention.layer_norm_rms_epsilon: is 0.001; config.json has rms_norm_eps = 1e-06"),
        ("qwen2", "rope-base", "qwen2.rope.freq_base: is not in the file: llama.cpp takes 10000; config.json has "),
        ("gpt2", "transposed", ".weight: is not transposed: "),
    ],
)  # fmt: skip
def test_a_fault_of_the_file_is_said_as_weights_says_it(arch, mistake, fault, ported, checkpoint, tmp_path):
    found = ported(arch, mistake)
    assert [place.fault is not None for place in found.places] == [True] * bool(fault)
    assert not found.keys
    assert [line for line in found.concerns if "token_embd.weight: row 0 is all zero" not in line] == []
    for place in found.places:
        assert place.side == "the file"
        assert fault in place.fault
        said = {f"{each.where}: {each.says}" for each in judge_weights(tmp_path / "m.gguf", checkpoint(arch)).findings}
        assert place.fault.partition(" (and ")[0] in said
    for first in found.places[:1]:
        assert headline(found).startswith(f"the file, {first.name}: {first.fault}; convert m.gguf again")


def test_a_right_port_ends_with_0(checkpoint, tmp_path):
    path = convert(checkpoint("qwen2"), "qwen2", tmp_path / "m.gguf", "F32")
    ended = command(path, checkpoint("qwen2"))
    assert ended.exit_code == 0
    assert ended.output.startswith("MATCH  llama.cpp computes what Qwen2ForCausalLM does")
    assert "the last values are off by an NMSE of" in ended.output
    assert f"were not looked at: llamadiff weights {path}" in " ".join(ended.output.split())


MODULE = """
import torch, transformers
def load():
    return transformers.AutoModelForCausalLM.from_pretrained({folder!r}, attn_implementation="eager")
def nothing():
    return 3
def shared():
    return Small([torch.nn.Linear(256, 256)] * 2)
def narrow():
    model = Small([torch.nn.Linear(64, 64) for _ in range(2)])
    model.embed = torch.nn.Embedding(320, 64)
    return model
def listless():
    return torch.nn.Embedding(320, 64)
def skips():
    made = load()
    made.config.num_hidden_layers = 1
    return made
def another():
    made = load()
    for x in made.parameters():
        x.data = torch.randn_like(x)
    return made
def damaged():
    made = load()
    made.model.layers[1].mlp.down_proj.weight.data.normal_()
    return made
def single():
    class Single(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.own = load()
        def forward(self, ids):
            return self.own(ids.view(1, 4))  # of 12 ids
    return Single()
class Small(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.embed, self.layers = torch.nn.Embedding(320, 256), torch.nn.ModuleList(layers)
def fails():
    raise ValueError("no weights")
"""


def test_a_module_of_ones_own_is_run_by_its_function(checkpoint, tmp_path):
    path = convert(checkpoint("llama"), "llama", tmp_path / "m.gguf", "F32")
    (tmp_path / "mine.py").write_text(MODULE.format(folder=str(checkpoint("llama"))), encoding="utf-8")
    found = port(path, f"{tmp_path / 'mine.py'}:load", Run(tokens=TOKENS), USUAL)
    assert found.verdict == "match"
    refused = {
        "nothing": "gave int", "fails": "no weights", "absent": "has no function absent",
        "listless": "no list of layers", "shared": "one module as several layers",
        "skips": "more than once, or not at all", "narrow": "holds another model", "another": "holds another model",
        "single": r"failed on ids \[1, 12\] at mine.py:\d+ \(RuntimeError: shape .*; a module that takes",
    }  # fmt: skip
    for function, says in refused.items():
        with pytest.raises(UserError, match=says):
            port(path, f"{tmp_path / 'mine.py'}:{function}", Run(tokens=TOKENS), USUAL)
    quantized = convert(checkpoint("llama"), "llama", tmp_path / "q.gguf", "Q8_0")
    with pytest.raises(UserError, match=r"is quantized, and model.layers.1.mlp.down_proj.* is not found in it"):
        port(quantized, f"{tmp_path / 'mine.py'}:damaged", Run(tokens=TOKENS), USUAL)


def test_ids_of_the_prompt_are_those_of_the_checkpoints_tokenizer(checkpoint, tmp_path):
    path = convert(checkpoint("llama"), "llama", tmp_path / "m.gguf", "F32")
    fields, tensors = read_gguf(path)
    merges, *types = fields["tokenizer.ggml.merges"]
    prompt = Run(2 * merges[0].replace(" ", "").replace("\u0120", " "))
    found = port(path, str(checkpoint("llama")), prompt, USUAL)
    assert (found.verdict, found.other_ids) == ("match", None)
    fields["tokenizer.ggml.merges"] = (merges[-1:], *types)
    found = port(write_gguf(path, fields, tensors), str(checkpoint("llama")), prompt, USUAL)
    assert (found.verdict, found.places) == ("wrong", [])
    assert "ids of the prompt are not those of the checkpoint's tokenizer" in headline(found)


def test_yarn_that_a_config_wants_unrounded_is_llama_cpps_to_mend(tmp_path):
    """As gpt-oss has it: no key of a file can say so."""
    rope = {**MODELS["qwen2"][1]["rope_parameters"], "truncate": False}
    folder = make(tmp_path / "ck", "qwen2", rope_parameters=rope)
    path = convert(folder, "qwen2", tmp_path / "m.gguf", "F32")
    found = port(path, str(folder), Run(tokens=TOKENS), USUAL)
    [place] = found.places
    assert (place.side, place.name) == (GRAPH, "ROPE Qcur_rope and Kcur_rope, layers 0, 1")
    assert place.says == ("blends YaRN's frequencies over pairs 0.00 to 2.69; llama.cpp's graph rounds these to 0 to 3")


@pytest.mark.parametrize("wrong", ["", "result_norm", "l_out-1"])
def test_what_a_checkpoint_without_a_head_does_not_compute_is_not_compared(wrong, checkpoint, monkeypatch, tmp_path):
    import transformers

    folder = tmp_path / "headless"
    transformers.AutoModel.from_pretrained(checkpoint("qwen3")).save_pretrained(folder)
    path = convert(checkpoint("qwen3"), "qwen3", tmp_path / "m.gguf", "F32")
    erring(monkeypatch, {wrong: 1.01} if wrong else {})
    found = port(path, str(folder), Run(tokens=TOKENS), USUAL)
    assert [node.label for place in found.places for node in place.nodes] == [wrong] * bool(wrong)
    assert (found.verdict, found.code, found.end) == ("wrong" if wrong else "match", "Qwen3Model", "result_norm")
    assert headline(found).endswith("result_norm agrees to " + f"{found.logits:.1e}") or wrong


def test_a_parameter_that_nothing_depends_on_is_not_read():
    """As BERT's pooler, which a file of vectors lacks."""
    import torch

    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head, self.pooler = (torch.nn.Linear(4, 4) for _ in range(3))

        def forward(self, ids):
            x = self.head(self.embed(torch.nn.functional.one_hot(ids, 4).float()))
            return SimpleNamespace(last_hidden_state=x, pooler_output=self.pooler(x[:, 0]))

    read = {name: is_read(Own(), name) for name, _ in Own().named_parameters() if name.endswith("weight")}
    assert read == {"embed.weight": True, "head.weight": True, "pooler.weight": False}


@pytest.mark.parametrize("kind", ["BF16", "Q8_0"])
def test_an_adapter_that_is_applied_is_in_a_merged_checkpoint(kind, checkpoint, tmp_path):
    import torch
    import transformers

    path = convert(checkpoint("qwen3"), "qwen3", tmp_path / "m.gguf", kind)
    adapter = write_adapter(tmp_path / "a.gguf", path, ("attn_q", "attn_output", "ffn_down"))
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint("qwen3"))
    made = merged(adapter, path)
    for name, values in model.named_parameters():
        tensor = usual_names("qwen3", 2)(name)
        if tensor in made:
            values.data = torch.from_numpy(made[tensor]).bfloat16()
    model.save_pretrained(tmp_path / "merged")
    for scale, verdicts in ((1.0, ("match", "noise")), (0.5, ("wrong",))):
        settings = Settings(lora=str(adapter), lora_scale=scale)
        run, candidate = Run(tokens=TOKENS, settings=settings), f"transformers:{tmp_path / 'merged'}"
        assert compare(path, run, candidate).verdict in verdicts
        if scale == 1:
            assert port(path, str(tmp_path / "merged"), run, USUAL).verdict == "match"
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    kept_as_in(model, ModelFile(path, settings=settings))
    after = model.state_dict()
    assert kind == "Q8_0" or all(torch.equal(x, after[name]) for name, x in before.items() if x.dtype == torch.bfloat16)


def test_what_cannot_be_held_against_each_other_is_refused(checkpoint, tmp_path):
    quantized = convert(checkpoint("llama"), "llama", tmp_path / "q.gguf", "Q8_0")
    with pytest.raises(UserError, match=r"model_type is 'qwen3', q.gguf holds llama; give the checkpoint"):
        port(quantized, str(checkpoint("qwen3")), Run(tokens=TOKENS), USUAL)
    path = convert(checkpoint("llama"), "llama", tmp_path / "m.gguf", "F32")
    beside = checkpoint("llama") / "model.safetensors"
    for wrong, says in ((tmp_path / "nowhere", "no directory of a"), (beside, f"it lies in, {beside.parent}"),
                        ("Qwen/Qwen2", "hf download Qwen/Qwen2 --local-dir")):  # fmt: skip
        with pytest.raises(UserError, match=says):
            port(path, str(wrong), Run(tokens=TOKENS), USUAL)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match=r"config.json"):
        port(path, str(empty), Run(tokens=TOKENS), USUAL)


def test_code_beside_a_checkpoint_is_never_run(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "ck")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_evil.Evil", "AutoConfig": "modeling_evil.Config"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "modeling_evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')", encoding="utf-8")
    path = convert(folder, "llama", tmp_path / "m.gguf", "F32")
    assert port(path, str(folder), Run(tokens=TOKENS), USUAL).verdict == "match"
    assert not (tmp_path / "ran").exists()


def test_a_list_of_layers_that_no_key_has_leaves_it_open_whose_a_place_is():
    config = {"no_rope_layers": [1, 0], "layer_types": ["full", "full"], "kinds": [0, 1], "unread": [2, 1]}
    file = SimpleNamespace(weights=SimpleNamespace(fields={"llama.kinds": [0, 1]}))
    lists = uneven(file, config, ["no_rope_layers", "layer_types", "kinds", "absent"], 2)
    assert lists == {"no_rope_layers": [1, 0]}
    place = ("ROPE Qcur_rope", "does not rotate at all", "")
    blame = Blame((), {}, GRAPH, is_own=False, lists=lists)
    assert (blame.of(*place, (1,)), blame.of(*place, (0, 1))) == (UNSURE, FILE)
    assert blame.unkept([(0, 1)]) == []
    assert blame.unkept([(1,)]) == ["no key has no_rope_layers = [1, 0] of config.json, which the model reads"]
    assert replace(blame, opinion=None).of(*place, (1,)) == GRAPH
    assert replace(blame, keys=("llama.rope.freq_base is 1",)).of(*place, (1,)) == FILE
