"""An architecture is one file: what adding one takes, followed once, and nothing outside that asks for one by name."""

from __future__ import annotations

import ast
import sys
from dataclasses import replace
from importlib import import_module

import pytest
from llamaref import ARCHITECTURES, Engine, ModelError, models
from models.small import write_model
from places import ROOT

from llamadiff.candidates.reference import record
from llamadiff.comparison.api import diff

MODELS = ROOT / "reference/llamaref/models"
TOKENS = (1, 17, 5, 80, 42, 9)

# What toyllama has and llama has not: a line of llama.py, and what stands there instead.
TOY = {
    '"""llama: ': '"""toyllama: windows in every other layer, a scale of its own; otherwise ',
    "import numpy as np\n": "from dataclasses import replace\n\nimport numpy as np\n",
    "import Traits": "import Traits, Windows",
    "rope_pairs=True": 'windows=Windows(length=0, period=2), keys="toy_scale", configure=configure',
    "TRAITS = ": """def configure(c, read):
    return replace(c, embedding_scale=read.number("toy_scale", 1.0))


TRAITS = """,
    "rope_pairs(": "rope_halves(",
    "m.attention(i, q, k, v, step)": "m.attention(i, q, k, v, step, window=m.config.windows[i])",
}


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A model of an architecture that one new file defines."""
    text = (MODELS / "llama.py").read_text()
    for line, instead in TOY.items():
        assert line in text
        text = text.replace(line, instead)
    (tmp_path / "toyllama.py").write_text(text)
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(tmp_path)])
    monkeypatch.setitem(ARCHITECTURES, "toyllama", import_module("llamaref.models.toyllama"))
    yield write_model(tmp_path / "toy.gguf", "toyllama", extra={"attention.sliding_window": 3, "toy_scale": 8.0})
    del sys.modules["llamaref.models.toyllama"]


def test_a_file_adds_an_architecture(toy):
    engine = Engine(toy)
    assert (engine.config.windows, engine.config.embedding_scale) == ((3, 0), 8.0)
    right = record(engine, TOKENS, "right")
    assert diff(right, right, toy).verdict == "match"
    engine.config = replace(engine.config, windows=(0, 0))
    found = diff(right, record(engine, TOKENS, "without its window"), toy)
    assert found.first_divergence.tap == "kq_soft_max-0"


def test_without_its_file_the_architecture_is_not_known(tmp_path):
    with pytest.raises(ModelError, match="architecture 'toyllama' is not implemented; the engine has deepseek2, gemma"):
        Engine(write_model(tmp_path / "toy.gguf", "toyllama"))


# Names of architectures that mean something else: tokenizers; and the model that is trained is a llama. What becomes of
# a checkpoint's tensors and keys is a table by architecture, of converters and not of engines.
OTHERWISE = {"llamadiff/trace/token_text.py", "llamadiff/shipped/train.py"}
OUTSIDE = [
    path
    for folder in ("llamadiff", "reference/llamaref")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path.parent not in (MODELS, ROOT / "llamadiff/weights") and str(path.relative_to(ROOT)) not in OTHERWISE
]


def named(node):
    """The last part of what an expression is called."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None


def asks_for_one(node):
    """Whether an expression names an architecture, or compares what a model's is with a text."""
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        texts = [side for side in sides if isinstance(side, ast.Constant | ast.Tuple | ast.List | ast.Set)]
        return bool(texts) and "architecture" in map(named, sides)
    return isinstance(node, ast.Constant) and node.value in ARCHITECTURES


def test_no_architecture_is_asked_for_by_name():
    asked = {
        path: [node.lineno for node in ast.walk(ast.parse(path.read_text())) if asks_for_one(node)] for path in OUTSIDE
    }
    assert {str(path.relative_to(ROOT)): lines for path, lines in asked.items() if lines} == {}


@pytest.mark.parametrize(
    "text",
    ['x.architecture == "phi9"', 'architecture in ("a", "b")', '"gemma2"', '{"olmo2": 1}', 'a.startswith("gemma")'],
)
def test_such_a_question_is_seen(text):
    assert any(asks_for_one(node) for node in ast.walk(ast.parse(text)))
