"""The recipes of docs/engines.md, each pasted into a file and run as its page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import pytest
from optional import needs
from places import ROOT
from toolchains import TOOLS, if_installed

from llamadiff.ext.writers import writers
from llamadiff.trace.reader import Trace

PAGE = (ROOT / "docs" / "engines.md").read_text("utf-8")
RECIPES = dict(re.findall(r"^```([a-z]+(?: torch)?)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
TOKENS = [1, 5, 3]


def program(language, folder):
    """The command that runs a recipe, built in a folder with the writer beside it."""
    tool = TOOLS[language]
    (folder / writers.LANGUAGES[language].file).write_text(writers.source(language), encoding="utf-8")
    (folder / tool.driver).write_text(RECIPES[language], encoding="utf-8")
    if tool.build:
        done = subprocess.run(tool.build, cwd=folder, capture_output=True, text=True, check=False, encoding="utf-8")
        assert done.returncode == 0, done.stderr
    return [word.format(folder=folder) for word in tool.run]


@pytest.mark.parametrize("language", [if_installed(name) for name in ("python", "js", "cpp", "rust", "c")])
def test_a_recipe_records_what_it_says(language, tmp_path):
    done = subprocess.run(
        program(language, tmp_path), cwd=tmp_path, capture_output=True, text=True, check=False, encoding="utf-8"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    trace = Trace.open(tmp_path / "mine.safetensors")
    assert list(trace.info.tokens) == TOKENS
    assert trace.info.producer["name"] == "my engine"
    np.testing.assert_array_equal(trace["embd"], [[token, 2 * token, 0, 1] for token in TOKENS])


@needs("torch", "transformers")
def test_the_recipe_of_pytorch(tmp_path):
    (tmp_path / "engine.py").write_text(RECIPES["python torch"], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "engine.py"], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
     encoding="utf-8")  # fmt: skip
    assert done.returncode == 0, done.stderr
    trace = Trace.open(tmp_path / "mine.safetensors")
    assert list(trace.info.tokens) == TOKENS
    assert trace["embd"].shape == (3, 4)


def test_every_code_block_is_run():
    assert set(RECIPES) == {"python torch", "python", "js", "cpp", "rust", "c", "yaml"}
