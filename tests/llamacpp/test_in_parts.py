"""Long prompts are recorded in parts, so that llama.cpp holds little of them at once; what is recorded is the same."""

from __future__ import annotations

import numpy as np
import pytest
from models.options import OPTIONS, write_long
from optional import needs_slices

from llamadiff import compare
from llamadiff.engines.run_spec import Run
from llamadiff.llamacpp.observer import AT_ONCE, Observer

TOKENS = tuple(int(token) for token in np.random.default_rng(3).integers(3, 90, 2 * AT_ONCE + 1))
QUICK = ("gemma2", "mamba2")
# gpt2's room for positions is one part; the kinds of llama differ in what parts do not change
ARCHITECTURES = [arch for arch in sorted(OPTIONS) if arch != "gpt2" and not arch.startswith("llama-")]


@pytest.mark.parametrize("n", [1, AT_ONCE, AT_ONCE + 1, 2 * AT_ONCE + 1, 2047])
def test_parts_are_few_and_even(n):
    capture = object.__new__(Observer)
    capture.at_once = AT_ONCE
    parts = capture._parts(5, 5 + n)
    assert [i for first, last in parts for i in range(first, last)] == list(range(5, 5 + n))
    sizes = [last - first for first, last in parts]
    assert len(sizes) == -(-n // AT_ONCE)
    assert max(sizes) - min(sizes) <= 1
    capture.at_once = 0
    assert capture._parts(5, 5 + n) == [(5, 5 + n)]


def model(arch, folder, kind="F32"):
    return write_long(folder / "m.gguf", arch, kind)


@pytest.mark.parametrize(
    "arch", [arch if arch in QUICK else pytest.param(arch, marks=pytest.mark.slow) for arch in ARCHITECTURES]
)
def test_a_run_in_parts_is_right(arch, tmp_path):
    """Windows, states, caches: what a part leaves is what the next one finds. Two tokens are generated after it."""
    found = compare(model(arch, tmp_path), Run(tokens=TOKENS, n_predict=2))
    assert found.verdict == "match", found.headline
    assert len(found.tokens) == len(TOKENS) + 2


@needs_slices("state")
@pytest.mark.parametrize("kind", ["Q4_0", pytest.param("F16", marks=pytest.mark.slow)])
def test_what_is_recorded_in_parts_is_what_a_run_in_one_go_records(kind, tmp_path):
    found = compare(model("llama", tmp_path, kind), TOKENS, candidate=f"llama.cpp:ubatch={len(TOKENS)}")
    assert found.verdict == "match"
    assert len(found.batches) <= 1  # said to be one
    assert all(row.drift.nmse < 1e-9 for row in found.rows if row.layer == 0 and row.drift)
