"""Decode steps: a right engine is right on every way in, and each of the bugs of a KV cache is called by its name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from strangers.model import read

from decoding.bugs import ENGINES, NAMED
from decoding.engine import CHUNKS, PREFILL, SINGLY, Engine, recorded, save
from decoding.ways import PROMPT, STEPS, WAYS, Run, alone, exists
from llamadiff import UserError, compare
from llamadiff.comparison import Comparison
from llamadiff.demo import shipped_model
from llamadiff.pipeline import diff, record
from llamadiff.taps import parse
from llamadiff.trace import Trace

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


@pytest.mark.parametrize("way", WAYS)
def test_a_right_engine_is_right_on_every_way_in(way: str, prompt, tmp_path: Path):
    judged(WAYS[way](Run(shipped_model(), CHUNKS, "none", prompt, tmp_path)), "none")


@pytest.mark.slow
@pytest.mark.parametrize(("how", "bug", "way"), PRODUCT)
@pytest.mark.parametrize("quantized", [False, True], ids=["F16", "Q4_K_M"])
def test_a_bug_is_named_on_every_way_in(how: str, bug: str, way: str, quantized: bool, prompt, tmp_path: Path):
    judged(WAYS[way](Run(shipped_model(quantized), how, bug, prompt, tmp_path)), bug)


@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_parts_is_named_on_every_way_in(way: str, prompt, tmp_path: Path):
    judged(WAYS[way](Run(shipped_model(), PREFILL, "rows off by one", prompt, tmp_path)), "rows off by one")
