"""llamadiff.torch.record: a PyTorch model's modules as a trace, under a built-in map or one given in Python."""

from __future__ import annotations

import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from optional import needs
from places import ROOT

from llamadiff import UserError, compare
from llamadiff.engines.reference_model import Model
from llamadiff.engines.run_spec import How
from llamadiff.ext.pytorch.modules import run
from llamadiff.ext.pytorch.transformers import loaded
from llamadiff.torch import record

TOKENS = (1, 17, 5, 80, 42, 9, 33)


@pytest.fixture(scope="module")
def hf_model(small_model):
    path = small_model("llama")
    return lambda kind: loaded(path, kind, Model(path).sizes)


@needs("torch", "transformers")
@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize("way", ["file", "memory"])
def test_a_hugging_face_model_is_recorded_and_judged(way, kind, hf_model, small_model, tmp_path):
    path = tmp_path / "mine.safetensors" if way == "file" else None
    model = hf_model(kind).train()
    trace = record(model, TOKENS, path)
    assert model.training
    assert trace.info.tokens == TOKENS
    assert trace.dtypes["model.layers.1.mlp.up_proj"] == {"f32": "F32", "bf16": "BF16"}[kind]
    result = compare(small_model("llama"), candidate=trace if path is None else str(path), how=How(name_map="hf"))
    assert result.verdict == ("match" if kind == "f32" else "noise"), result.summary
    assert result.candidate["name"] == "LlamaForCausalLM"
    words = {row.tap.rsplit("-", 1)[0] for row in result.rows}
    assert words >= {"embd", "Qcur_proj", "kqv_out", "attn_out", "ffn_inp", "ffn_swiglu", "l_out", "result_output"}
    assert not result.extra


@needs("torch", "transformers")
def test_a_trace_that_was_there_is_replaced_and_a_model_is_not(hf_model, small_model, tmp_path):
    for _ in range(2):
        record(hf_model("f32"), TOKENS, tmp_path / "mine.safetensors")
    assert [file.name for file in tmp_path.iterdir()] == ["mine.safetensors"]
    with pytest.raises(UserError, match="is a model"):
        record(hf_model("f32"), TOKENS, small_model("llama"))


class Blocks:
    """An own module of two blocks, made when torch is there."""

    def __new__(cls):
        import torch

        class Own(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.wte = torch.nn.Embedding(96, 256)
                self.blocks = torch.nn.ModuleList([torch.nn.Linear(256, 256) for _ in range(2)])
                self.shared = torch.nn.Tanh()

            def forward(self, ids):
                x = self.wte(ids)
                for block in self.blocks:
                    x = self.shared(block(x))
                return x

        return Own()


@needs("torch", "transformers")
def test_an_own_module_is_recorded_under_the_taps_names(tmp_path):
    model = Blocks()
    trace = record(model, TOKENS, tmp_path / "t.safetensors", mapping={"embd": "wte", "l_out": "blocks.{i}"})
    assert set(trace) == {"embd", "l_out-0", "l_out-1"}
    assert trace.shape("l_out-1") == (7, 256)  # without the batch of one
    assert np.array_equal(trace["embd"], model.wte.weight.detach().numpy()[list(TOKENS)])
    flat = record(model, TOKENS, mapping={"ffn_inp": "blocks.{i} (input)"}, call=lambda ids: model(ids[0]))
    assert {name: flat.shape(name) for name in flat} == {"ffn_inp-0": (7, 256), "ffn_inp-1": (7, 256)}


@needs("torch", "transformers")
def test_a_map_as_a_file_names_the_modules(tmp_path):
    (tmp_path / "map.toml").write_text('[l_out]\nname = "blocks.{i}"\n', encoding="utf-8")
    assert set(record(Blocks(), TOKENS, mapping=tmp_path / "map.toml")) == {"blocks.0", "blocks.1"}


@needs("torch", "transformers")
@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ("hf", r"no module of Own has a name that the map has; the first are wte, blocks, blocks.0"),
        ({"l_out": "nothing.{i}"}, r"mapping: l_out: Own has no module nothing.\{i\}$"),
        ({"embd": "wte", "l_out": "block.{i}"}, r"has no module block.\{i\}; did you mean blocks.\{i\}\?"),
        (None, "mapping: is None; expected hf, a map's file, or a mapping of taps to modules"),
        ({"lout": "blocks.{i}"}, "lout is no tap"),
        ({"result_norm": "shared"}, "shared ran more than once"),
    ],
)
def test_what_cannot_be_recorded_is_said(mapping, message, tmp_path):
    with pytest.raises(UserError, match=message):
        record(Blocks(), TOKENS, tmp_path / "t.safetensors", mapping=mapping)
    assert not list(tmp_path.iterdir())


@needs("torch")
def test_ids_may_be_a_tensor_and_are_of_one_text():
    import torch

    mapping = {"embd": "wte"}
    assert record(Blocks(), torch.tensor([TOKENS]), mapping=mapping).info.tokens == tuple(TOKENS)
    refused = {
        "Once": "is a text",
        ((1, 2), (3, 4)): "ids: 2 rows",
        (1, 2.5): r"ids\[1\] is '2.5'; expected whole numbers",
    }
    for ids, says in refused.items():
        with pytest.raises(UserError, match=says):
            record(Blocks(), ids, mapping=mapping)


def test_it_is_imported_without_torch():
    code = "import sys; sys.modules['torch'] = None; import llamadiff; llamadiff.torch.record; print('fine')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, encoding="utf-8")
    assert done.stdout == "fine\n", done.stderr


@pytest.fixture(scope="module")
def checkpoint(hf_model, small_model, tmp_path_factory):
    """A directory with a Hugging Face model, my-model, and its GGUF file beside it."""
    folder = tmp_path_factory.mktemp("checkpoint")
    loaded = hf_model("f32")
    config = type(loaded.config)(**{k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"})
    plain = type(loaded)(config)  # transformers writes no model that came from a GGUF file
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(folder / "my-model")
    (folder / "my-model.gguf").write_bytes(small_model("llama").read_bytes())
    return folder


@needs("torch", "transformers")
def test_the_recipe_of_the_docs_works_as_it_is_written(checkpoint, monkeypatch, capsys):
    text = (ROOT / "docs" / "pytorch.md").read_text("utf-8")
    recipe = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    assert len(recipe.splitlines()) <= 15
    monkeypatch.chdir(checkpoint)
    exec(recipe.replace("[1, 403, 407, 261, 378]", str(list(TOKENS))), {})
    assert (
        "what was recorded of LlamaForCausalLM is right on the inputs it was given; 29 taps" in capsys.readouterr().out
    )
    assert (checkpoint / "mine.safetensors").exists()


@needs("torch", "transformers")
def test_a_directory_of_hugging_face_is_run(checkpoint):
    result = compare(checkpoint / "my-model.gguf", TOKENS, candidate=f"transformers:{checkpoint / 'my-model'}")
    assert result.verdict == "match"


@needs("torch", "transformers")
def test_the_directory_alone_is_answered_with_the_way_to_run_it(checkpoint):
    with pytest.raises(UserError, match=f"--candidate transformers:{checkpoint / 'my-model'} runs it"):
        compare(checkpoint / "my-model.gguf", TOKENS, candidate=str(checkpoint / "my-model"))


@needs("torch")
def test_logits_that_are_scaled_behind_the_head_are_the_models():
    import torch

    class Capped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.lm_head = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9)

        def forward(self, ids):
            return SimpleNamespace(logits=torch.tanh(self.lm_head(self.embed(ids))))

    model = Capped()
    seen = run(model, (1, 5, 2))
    assert torch.equal(seen["lm_head"], torch.tanh(model.lm_head(model.embed(torch.tensor([[1, 5, 2]])))))
