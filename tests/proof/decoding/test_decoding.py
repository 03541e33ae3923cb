"""Decode steps: a right engine is right on every way in, and each of the bugs of a KV cache is called by its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamadiff import compare
from llamadiff.engines import run_spec
from llamadiff.llamacpp.shipped import shipped_model
from llamadiff.result.comparison import Comparison
from llamadiff.trace.taps import parse
from llamadiff.verbs.verbs import record
from proof.decoding.bugs import DECODING, KV_BUGS
from proof.decoding.engine import CHUNKS, PREFILL, SINGLY, Generating, save
from proof.decoding.ways import PROMPT, WAYS, Run, alone, exists
from proof.strangers.model import read

HOW = (PREFILL, CHUNKS, SINGLY)
PRODUCT = [
    pytest.param(how, bug, way, id=f"{way}-{how}-{bug}")
    for how in HOW
    for bug in DECODING
    for way in WAYS
    if exists(how, bug)
]


@pytest.fixture(scope="module")
def prompt(tmp_path_factory) -> tuple[int, ...]:
    return record(shipped_model(), run_spec.Run(PROMPT), tmp_path_factory.mktemp("ids") / "ids.safetensors").info.tokens


def judged(result: Comparison, bug: str) -> None:
    """A right run is silent; a wrong one names its bug, at its tap, and accuses no other op."""
    if bug == "none":
        assert (result.verdict, result.wrong, result.diagnosis) == ("match", (), ())
        assert result.parting is None or "which rounding decides" in result.summary  # llama.cpp rounds to eight bits
        return
    _, word, cause = KV_BUGS[bug]
    first = result.first_divergence
    assert first is not None
    assert parse(first.tap).kind.word == word
    assert all(found.known for found in result.diagnosis)
    assert cause in [found.name for found in result.diagnosis[0].causes]


@pytest.mark.parametrize(("how", "bug"), [(how, bug) for how in HOW for bug in DECODING if exists(how, bug)])
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


@pytest.mark.parametrize(
    "bug",
    ["none", "rows off by one", "rows overwritten", "first row fed twice", "cache too short", "cached before RoPE"],
)
def test_a_recorded_cache_names_the_bug(bug: str, prompt, tmp_path: Path):
    engine = Generating(read(shipped_model()), len(prompt) + 4, DECODING[bug])
    tokens = engine.generate(prompt, PREFILL, 4)
    path = save(tmp_path / "m.safetensors", engine, tokens, len(prompt), cache=True)
    result = compare(shipped_model(), candidate=path)
    if bug == "none":
        judged(result, bug)
        return
    assert result.first_divergence is not None
    assert result.first_divergence.tap == "kv_k-0"
    assert KV_BUGS[bug][2] in [found.name for found in result.diagnosis[0].causes]
