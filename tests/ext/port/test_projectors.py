"""What sees and hears, in a checkpoint's own code against llama.cpp's graph of its projector file.

Graphs of a real llama-mtmd-cli are slow to have (llama_server.py): they are kept for one kind in recorded/, where files
and modules with mistakes are quick. All kinds, with files by llama.cpp's own converter, are slow tests.
"""

from __future__ import annotations

import json
import os
from functools import cache
from importlib.metadata import version
from pathlib import Path

import llama_server
import numpy as np
import pytest
from ext.port.architectures import convert
from ext.port.projector_mistakes import FILES, MODULES
from ext.port.projectors import SENSES, make, write_llava, write_smolvlm
from models.gguf_file import read_gguf, write_gguf
from models.vision_model import write_picture, write_sound
from optional import needs
from tools.parts import PACKAGE, sources
from typer.testing import CliRunner

from llamadiff import UserError
from llamadiff.cli.app import app
from llamadiff.engines.model_file import ModelFile
from llamadiff.engines.run_spec import USUAL
from llamadiff.ext.graph.graph import Graph
from llamadiff.ext.port import projector_run as verb
from llamadiff.ext.port.graph_values import node_values
from llamadiff.ext.port.page import headline
from llamadiff.ext.port.projector_graph import ProjectorRun, program_of, with_input
from llamadiff.ext.port.projector_run import Media, ProjectorModel, media_of, port_projector
from llamadiff.ext.port.stand_in import width_of, write_stand_in
from llamadiff.llamacpp.request import Settings

pytestmark = [needs("torch", "transformers"), pytest.mark.filterwarnings("ignore")]
RECORDED = Path(__file__).parent / "recorded/smolvlm.graph"
# kind -> the places where this llama.cpp parts from the model's own code
KNOWN = {
    "gemma3": [], "smolvlm": [], "idefics3": [], "qwen2audio": [],
    "qwen2vl": ["GELU ffn_gelu"], "qwen25vl": ["GELU ffn_gelu"], "qwen3vl": ["GELU ffn_gelu"],
    "pixtral": ["GELU ffn_gelu"], "lfm2vl": ["GELU ffn_gelu"], "voxtral": ["POOL_1D"],
    "llava": ["ADD", "MUL_MAT mm.0", "GELU"],
    "internvl": ["ADD pos_embed", "GELU ffn_gelu, layers 0-3"],
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    return cache(lambda name: make(folder / name, name))


def changed(monkeypatch, edit):
    """The module, with a mistake in it."""
    usual = verb.projector_model

    def model(*words):
        found = usual(*words)
        edit(found)
        return found

    monkeypatch.setattr(verb, "projector_model", model)


# -- of a graph that was recorded --------------------------------------------------------------------------------------


@pytest.fixture
def seen(checkpoint, tmp_path, monkeypatch):
    """What is found of a SmolVLM's file, with a mistake or without."""

    def run(file, *_):
        graph, fed = with_input(Graph.read(RECORDED))
        model = ProjectorModel(file.path, graph, "vision", file)
        own = node_values(model.graph, model.weights)
        return ProjectorRun(graph, fed, own, "llama-mtmd-cli", 1)

    monkeypatch.setattr(verb, "projector_graph", run)

    def found(edit=None):
        path = write_smolvlm(checkpoint("smolvlm"), tmp_path / "mmproj.gguf", edit)
        return port_projector(path, str(checkpoint("smolvlm")), Media("image", Path("p.png")), Settings(), USUAL)

    return found


def test_a_right_eye_is_right(seen):
    found = seen()
    assert found.verdict == "match", [place.name for place in found.places]
    assert found.lineup.aligned + found.lineup.inside == found.lineup.nodes
    assert found.logits < 1e-11
    assert "what the text model is given agrees" in headline(found)
    assert "what llama.cpp made of p.png, 3 x 56 x 56" in found.fed


QUICK = ("up's rows permuted", "positions shifted", "channels reversed", "projector scaled", "q and k exchanged")


@pytest.mark.parametrize("name", QUICK)
def test_a_mistake_in_the_file_is_found_at_its_op(name, seen):
    check(seen(FILES[name].edit), FILES[name])


@pytest.mark.parametrize("name", [name for name, each in MODULES.items() if each.kind == "smolvlm"])
def test_what_the_model_does_otherwise_is_said_at_its_op(name, seen, monkeypatch):
    changed(monkeypatch, MODULES[name].edit)
    check(seen(), MODULES[name])


def test_rows_in_another_order_are_no_mistake(seen, monkeypatch):
    """As windows and class tokens are: what goes through the layers, and comes out in the usual order."""
    import torch

    order = torch.tensor([5, 0, 3, 1, 2, 4, *range(15, 5, -1)])

    def edit(model):
        embed, encode = model.vision_model.embeddings.forward, model.vision_model.encoder.forward
        model.vision_model.embeddings.forward = lambda **words: embed(**words)[:, order]

        def encoder(**words):
            out = encode(**words)
            out.last_hidden_state = out.last_hidden_state[:, torch.argsort(order)]
            return out

        model.vision_model.encoder.forward = encoder

    changed(monkeypatch, edit)
    assert seen().verdict == "match"


def check(found, mistake):
    """It is at its place, with these words, and nobody else is accused but by what llama.cpp is known for."""
    assert found.verdict == "wrong"
    known = KNOWN[mistake.kind] if "GELU" not in mistake.place else []
    places = [place for place in found.places if place.name not in known or mistake.says in place.says]
    said = [f"{place.name}: {place.fault or ''}: {place.says}" for place in places]
    assert any(words.startswith(mistake.place) and mistake.says in words for words in said), said
    assert {place.side for place in places} == {mistake.side}, said


# -- what is asked for -------------------------------------------------------------------------------------------------


def test_one_picture_or_one_sound_and_no_prompt():
    assert media_of(None, None, is_asked=True) is None
    assert media_of(None, Path("a.wav"), is_asked=False) == Media("audio", Path("a.wav"))
    with pytest.raises(UserError, match="give one of them"):
        media_of(Path("a.png"), Path("a.wav"), is_asked=False)
    with pytest.raises(UserError, match="is given no prompt"):
        media_of(Path("a.png"), None, is_asked=True)


def test_a_file_without_such_an_encoder_is_refused(checkpoint, tmp_path):
    path = write_smolvlm(checkpoint("smolvlm"), tmp_path / "mmproj.gguf")
    with pytest.raises(UserError, match="has no audio encoder; give --image FILE"):
        port_projector(path, "x", Media("audio", Path("s.wav")), Settings(), USUAL)
    with pytest.raises(UserError, match="is for a projector file"):
        port_projector(write_stand_in(tmp_path / "t.gguf", 64), "x", Media("image", Path("p.png")), Settings(), USUAL)


def test_a_program_that_is_not_there_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="llama-mtmd-cli is not on PATH"):
        program_of(Settings(runner=""))
    with pytest.raises(UserError, match="no llama-mtmd-cli in it"):
        program_of(Settings(llama_cpp=str(tmp_path), runner=""))
    with pytest.raises(UserError, match="on this machine alone"):
        program_of(Settings(runner="ssh board python3"))


def test_the_text_model_beside_it_is_as_wide_as_the_projector(tmp_path):
    file = ModelFile(write_stand_in(tmp_path / "t.gguf", 96))
    assert file.describe("")["embd"] == 96
    stacked = {"clip.vision.projection_dim": 64, "clip.vision.is_deepstack_layers": [True, False, True]}
    assert width_of(stacked, "vision") == 192
    with pytest.raises(UserError, match="projection_dim: is None"):
        width_of({}, "audio")


# -- llama.cpp's own program and converter -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def converted(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")

    def file(name):
        path = folder / f"{name}.gguf"
        if name == "llava":
            return write_llava(checkpoint(name), path)
        return convert(sources(version(PACKAGE)), checkpoint(name), path, "--mmproj")

    return cache(file)


@pytest.fixture
def looked(checkpoint, converted, tmp_path):
    """What is found of a file, by a picture or a sound."""
    build = llama_server.binary("llama-mtmd-cli").parent

    def found(name, edit=None):
        path = converted(name)
        if edit is not None:
            fields, tensors = read_gguf(path)
            edit(fields, tensors)
            path = write_gguf(tmp_path / "mmproj.gguf", fields, tensors, arch="clip")
        if SENSES[name].hears:
            media = Media("audio", write_sound(tmp_path / "s.wav"))
        else:
            side = 168 if name == "qwen25vl" else 56
            media = Media("image", write_picture(tmp_path / "p.png", side))
        return port_projector(path, str(checkpoint(name)), media, Settings(llama_cpp=str(build)), USUAL)

    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOWN)
def test_a_file_by_the_converter(name, looked):
    found = looked(name)
    assert [place.name for place in found.places] == KNOWN[name]
    assert {place.side for place in found.places} <= {"llama.cpp's graph"}
    assert found.own < 1e-5 or "POOL_1D" in KNOWN[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_mistake_in_a_converted_file(name, looked):
    check(looked(FILES[name].kind, FILES[name].edit), FILES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_what_a_model_does_otherwise(name, looked, monkeypatch):
    changed(monkeypatch, MODULES[name].edit)
    check(looked(MODULES[name].kind), MODULES[name])


@pytest.mark.slow
def test_the_command(checkpoint, converted, tmp_path):
    build, picture = llama_server.binary("llama-mtmd-cli").parent, write_picture(tmp_path / "p.png")
    words = ["port", converted("smolvlm"), checkpoint("smolvlm"), "--image", picture, "--llama-cpp", build, "-o"]
    done = CliRunner().invoke(app, [*map(str, words), str(tmp_path / "r.json")], env=dict(os.environ))
    assert done.exit_code == 0, done.output
    assert "MATCH  llama.cpp computes what SmolVLMModel does" in done.output
    assert json.loads((tmp_path / "r.json").read_text("utf-8"))["nodes"]["all"] > 50


@pytest.mark.slow
def test_what_is_no_picture_is_said_with_what_the_program_said(checkpoint, converted, tmp_path):
    build = llama_server.binary("llama-mtmd-cli").parent
    (tmp_path / "p.png").write_bytes(np.arange(64, dtype=np.uint8).tobytes())
    with pytest.raises(UserError, match="computed no encoder's graph"):
        port_projector(converted("smolvlm"), str(checkpoint("smolvlm")), Media("image", tmp_path / "p.png"),
                       Settings(llama_cpp=str(build)), USUAL)  # fmt: skip
