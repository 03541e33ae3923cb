"""Decode steps: a right engine is right on every way in, and each of the bugs of a KV cache is called by its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from decoding.bugs import ENGINES, NAMED
from decoding.engine import CHUNKS, PREFILL, SINGLY
from decoding.ways import PROMPT, WAYS, Run, alone, exists
from llamadiff.comparison import Comparison
from llamadiff.demo import shipped_model
from llamadiff.pipeline import record
from llamadiff.taps import parse

HOW = (PREFILL, CHUNKS, SINGLY)
PRODUCT = [
    pytest.param(how, bug, way, id=f"{way}-{how}-{bug}")
    for how in HOW
    for bug in ENGINES
    for way in WAYS
    if exists(how, bug)
]


@pytest.fixture(scope="module")
def prompt(tmp_path_factory) -> tuple[int, ...]:
    return record(shipped_model(), tmp_path_factory.mktemp("ids") / "ids.safetensors", PROMPT).info.tokens


def judged(result: Comparison, bug: str) -> None:
    """A right run is silent; a wrong one names its bug, at its tap, and accuses no other op."""
    if bug == "none":
        assert (result.verdict, result.wrong, result.diagnosis, result.parting) == ("match", (), (), None)
        return
    word, cause = NAMED[bug]
    first = result.first_divergence
    assert first is not None
    assert parse(first.tap).kind.word == word
    assert all(found.known for found in result.diagnosis)
    assert cause in [found.name for found in result.diagnosis[0].causes]


@pytest.mark.parametrize(("how", "bug"), [(how, bug) for how in HOW for bug in ENGINES if exists(how, bug)])
def test_a_bug_is_named_by_a_trace_alone(how: str, bug: str, prompt, tmp_path: Path):
    judged(alone(Run(shipped_model(), how, bug, prompt, tmp_path)), bug)


@pytest.mark.parametrize(("bug", "way"), [(bug, way) for bug in ("none", "rows off by one") for way in WAYS])
def test_right_and_wrong_are_told_apart_on_every_way_in(bug: str, way: str, prompt, tmp_path: Path):
    judged(WAYS[way](Run(shipped_model(), PREFILL, bug, prompt, tmp_path)), bug)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "bug", "way"), PRODUCT)
@pytest.mark.parametrize("quantized", [False, True], ids=["F16", "Q4_K_M"])
def test_a_bug_is_named_on_every_way_in(how: str, bug: str, way: str, quantized: bool, prompt, tmp_path: Path):
    judged(WAYS[way](Run(shipped_model(quantized), how, bug, prompt, tmp_path)), bug)
