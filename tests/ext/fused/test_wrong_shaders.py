"""Shaders of ggml-vulkan with a mistake where nodes run as one: `backend` sees none of it, `fused` says which nodes.

Slow. A build with Vulkan is had as `make backends` has it.
"""

from __future__ import annotations

import json
import os
import shutil

import pytest
from command import in_process_of_its_own
from ext.fused.wrong_shaders import LIBRARY, MISTAKES, write_wrong_build
from models.options import OPTIONS
from models.small import write_model
from tools.backends import PARTS
from tools.parts import MissingPartError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def build():
    try:
        return PARTS["vulkan"].make()
    except MissingPartError as error:
        pytest.skip(f"no Vulkan here: {error}")


def said(folder, command, model, tokens):
    usage = PARTS["vulkan"].use(folder)
    words = [command, model, "--tokens", tokens, *usage.options, "-o", "json:-"]
    done = in_process_of_its_own(*words, env={**os.environ, **usage.environment})
    return json.loads(done.stdout)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda each: each.changes.__name__)
def test_a_mistake_in_a_shader_is_found_with_its_nodes(tmp_path, build, mistake):
    model = write_model(tmp_path / "model.gguf", **OPTIONS[mistake.model])
    folder = tmp_path / "wrong"
    assert write_wrong_build(build, folder, mistake.changes)
    alone, found = (said(folder, command, model, mistake.tokens) for command in ("backend", "fused"))
    shutil.rmtree(folder)
    assert (alone["verdict"], found["verdict"]) == ("match", "wrong")
    kernel = f"{mistake.tap}: llama.cpp's {mistake.nodes}"
    assert found["headline"] == f"{kernel} is wrong as one kernel; its nodes are right alone"


@pytest.mark.parametrize(("model", "tokens"), sorted({(each.model, each.tokens) for each in MISTAKES}))
def test_shaders_as_they_are_are_right(tmp_path, build, model, tokens):
    assert said(build, "fused", write_model(tmp_path / "model.gguf", **OPTIONS[model]), tokens)["verdict"] == "match"


def test_a_build_is_copied_as_it_is_where_nothing_is_changed(tmp_path, build):
    assert not write_wrong_build(build, tmp_path / "copy", lambda _: [])
    assert (tmp_path / "copy" / LIBRARY).read_bytes() == (build / LIBRARY).read_bytes()
