"""Strangers in other languages: engines that were written apart, right and with mistakes of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from llamadiff.engines.run_spec import How
from llamadiff.result.comparison import Comparison
from llamadiff.verbs.verbs import diff
from proof.strangers import programs, recording
from proof.strangers.arithmetic import BY_NAME
from proof.strangers.crossing import SHAPES, TOKENS, baseline, kind_of, model_file, nmse, opened
from proof.strangers.engine import Engine
from proof.strangers.programs import PROGRAMS, Program

Array = np.ndarray
LIKE = {"int8": "Q8_0 cut scale"}  # the arithmetic in NumPy that is nearest; of the others float32
RIGHT = [
    pytest.param(program, model, kind, shape, id=f"{program.name}-{model}-{kind}-{shape}", marks=program.mark)
    for program in PROGRAMS
    for number, model in enumerate(program.models)
    for kind in program.kinds
    for shape in list(SHAPES)[: 1 + 2 * (number == 0)]
]
MISTAKES = [
    pytest.param(program, switch, word, id=f"{program.name}-{switch}", marks=program.mark)
    for program in PROGRAMS
    for switch, word in program.mistakes.items()
]

Run = Callable[[Program, str, str, str], dict[str, Array]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    """run(program, model, kind, switch): what it records."""

    def get(program: Program, model: str, kind: str, switch: str = "") -> dict[str, Array]:
        file = opened(model_file(folder, model, kind))
        return programs.run(program, switch, file, TOKENS, folder)

    return get


def _judged(folder: Path, model: str, kind: str, taps: dict[str, Array], diagnose: bool = False) -> Comparison:
    path = model_file(folder, model, kind)
    trace = recording.save(folder / "trace.safetensors", taps, TOKENS, name="a stranger")
    return diff(baseline(path, TOKENS, len(TOKENS)), trace, path, how=How(diagnose=diagnose))


@pytest.mark.parametrize("program", [pytest.param(each, id=each.name, marks=each.mark) for each in PROGRAMS])
def test_it_computes_what_the_other_strangers_do(program: Program, run: Run, folder: Path):
    """Apart from rounding and from what is elsewhere, an engine in NumPy records the same.

    Where both round to 8 bits, last digits decide now and then which way: they differ by less than either from float32.
    """
    model, kind = program.models[0], program.kinds[0]
    taps = run(program, model, kind, "")
    like, plain = (
        Engine(opened(model_file(folder, model, kind)), BY_NAME[name]).run(TOKENS)
        for name in (LIKE.get(program.name, "float32"), "float32")
    )
    limits = {name: max(1e-6, nmse(like[name], plain[name], name)) for name in taps}
    off = {name for name, values in taps.items() if nmse(values, like[name], name) > limits[name]}
    assert {kind_of(name) for name in off} == set(program.elsewhere)


@pytest.mark.parametrize(("program", "model", "kind", "shape"), RIGHT)
def test_a_right_program_is_not_accused(program: Program, model: str, kind: str, shape: str, run: Run, folder: Path):
    taps = run(program, model, kind, "")
    some = recording.only(taps, SHAPES[shape]) if SHAPES[shape] else taps
    result = _judged(folder, model, kind, some, diagnose=True)  # a known way of rounding is a cause, and harmless
    assert [row.tap for row in result.wrong] == []


@pytest.mark.parametrize(("program", "switch", "word"), MISTAKES)
def test_a_mistake_is_found(program: Program, switch: str, word: str, run: Run, folder: Path):
    model, kind = program.models[0], program.kinds[0]
    first = _judged(folder, model, kind, run(program, model, kind, switch)).first_divergence
    assert first is not None
    assert first.tap in (word, f"{word}-0")
