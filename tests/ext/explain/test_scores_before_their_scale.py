"""Scores may be written down before they are scaled, as taps describe them, and the model be right all the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from llamaref import Engine
from traces import TOKENS

from llamadiff.candidates.reference import record
from llamadiff.trace.reader import Trace
from llamadiff.verbs.verbs import diff

SCALE = 8  # of heads of 64


def _softmax(scores: np.ndarray) -> np.ndarray:
    seen = np.where(np.tri(scores.shape[-1], dtype=bool), scores, -np.inf)
    powers = np.exp(seen - seen.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True), np.float32)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "phi3"])
@pytest.mark.parametrize("goes_on", [False, True], ids=["written so", "computed so"])
def test_only_scores_that_are_gone_on_with_unscaled_are_wrong(
    name: str, goes_on: bool, small_model: Callable[..., Path]
):
    path = small_model(name)
    baseline = record(Engine(path), TOKENS, "engine")
    raw = {tap: np.asarray(baseline[tap] * SCALE) for tap in baseline if tap.startswith("kq-")}
    if goes_on:
        raw |= {tap.replace("kq-", "kq_soft_max-"): _softmax(scores) for tap, scores in raw.items()}
    values = {tap: raw.get(tap, np.asarray(baseline[tap])) for tap in baseline}
    found = diff(baseline, Trace(replace(baseline.info), values, dict.fromkeys(values, "F32")), path)
    told = 'it records its scores before they are scaled (a map states it: [kq] done = ["times 8"])'
    assert found.verdict == ("wrong" if goes_on else "match")
    assert (told in found.proof) is not goes_on
