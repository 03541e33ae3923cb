"""The strangers themselves: they share no code with what judges them, and their mistakes are those that they claim."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

from proof import injected
from proof.injected import BUGS, MODULES, base
from proof.strangers.arithmetic import ARITHMETICS, BY_NAME, Arithmetic
from proof.strangers.crossing import (
    NOTHING,
    TOKENS,
    Case,
    kind_of,
    model_file,
    nmse,
    opened,
    taps_of,
    truth_of,
)
from proof.strangers.engine import Engine

PARTS = ("architectures", "arithmetic", "attention", "engine", "experts", "model", "recording", "recurrent")
OWN = [Path(__file__).parent / f"{name}.py" for name in PARTS]
OWN += [Path(str(module.__file__)) for module in (injected, base, *MODULES)]
ROUNDED = 1e-11  # float32 leaves no more, whoever sums: 5e-13 to 1e-12 with six kernels of OpenBLAS
LAYOUTS = [arithmetic for arithmetic in ARITHMETICS if arithmetic.layout or arithmetic.online]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("strangers")


@pytest.mark.parametrize("source", OWN, ids=lambda source: f"{source.parent.name}/{source.name}")
def test_a_stranger_shares_no_code(source: Path):
    tree = ast.parse(source.read_text("utf-8"))
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    allowed = {"__future__", "collections", "dataclasses", "functools", "gguf", "injected", "itertools", "json", "math",
               "numpy", "pathlib", "strangers", "struct", "typing"}  # fmt: skip
    assert {name.removeprefix("proof.").split(".")[0] for name in names} <= allowed


def test_names_are_unique():
    assert len(BY_NAME) == len(ARITHMETICS)


@pytest.mark.parametrize("name", BUGS)
def test_a_mistake_is_where_it_is_said_to_be(name: str, folder: Path):
    injection = BUGS[name]
    case = Case(BY_NAME["float32"], injection.models[0], "F16", name)
    path = model_file(folder, case.model, case.kind)
    taps = taps_of(case, path)
    least = 1e-6 if name.startswith("half") else 1e-13  # float16 rounds, too, what does not overflow
    faulty = [kind_of(tap) for tap, error in truth_of(case, path, taps).items() if not error.whole <= least]
    present = {kind_of(tap) for tap in taps}
    assert set(faulty) <= set(injection.words)
    assert faulty[0] == next(word for word in injection.words if word in present)


@pytest.mark.parametrize("arithmetic", LAYOUTS, ids=lambda arithmetic: arithmetic.name)
def test_a_layout_is_elsewhere_where_it_says(arithmetic: Arithmetic, folder: Path):
    moved, there = set(), set()
    for model in ("llama", "qwen3"):
        file = opened(model_file(folder, model, "F32"))
        plain, other = (Engine(file, each).run(TOKENS) for each in (BY_NAME["float32"], arithmetic))
        assert {kind_of(tap) for tap in plain.keys() - other.keys()} == set(arithmetic.unrecorded)
        moved |= {kind_of(tap) for tap, values in other.items() if nmse(values, plain[tap], tap) > 1e-3}
        there |= {kind_of(tap) for tap in other}
    assert moved == there & set(arithmetic.elsewhere)


@pytest.mark.parametrize("number", range(len(ARITHMETICS)), ids=lambda number: ARITHMETICS[number].name)
def test_a_right_engine_agrees_with_itself(number: int, folder: Path):
    arithmetic, model = ARITHMETICS[number], ("llama", "qwen2", "qwen3", "moe")[number % 4]
    file = opened(model_file(folder, model, "Q8_0"))
    taps = Engine(file, arithmetic).run(TOKENS, len(TOKENS) - 2)
    again = Engine(file, arithmetic).run(TOKENS, len(TOKENS) - 2, given=taps)
    assert max(nmse(values, again[tap], tap) for tap, values in taps.items()) <= NOTHING


def test_every_arithmetic_is_right(folder: Path):
    """What comes out is near float64's: no more than 4 bits of K and V explain."""
    file = opened(model_file(folder, "llama", "F32"))
    exact = Engine(file, BY_NAME["float64"]).run(TOKENS)["result_output"]
    off = {each.name: nmse(Engine(file, each).run(TOKENS)["result_output"], exact, "") for each in ARITHMETICS}
    assert {name for name, error in off.items() if not error <= 0.03} == set()
    plain = BY_NAME["float32"]
    layouts = {each.name: off[each.name] for each in LAYOUTS if each.keys is each.values is plain.keys}
    assert off[plain.name] <= ROUNDED
    assert {name for name, error in layouts.items() if error > 2 * off[plain.name]} == set()


def test_a_step_by_step_run_is_the_same(folder: Path):
    file = opened(model_file(folder, "qwen3", "F16"))
    whole, steps = (Engine(file, BY_NAME["float64"]).run(TOKENS, n) for n in (0, 5))
    assert max(nmse(values, steps[tap], tap) for tap, values in whole.items()) <= 1e-24
    assert np.array_equal([len(values) for values in whole.values()], [len(values) for values in steps.values()])
