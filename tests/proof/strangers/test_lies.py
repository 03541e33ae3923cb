"""Lies: whatever is moved in a right trace is called WRONG there, above the size that the report states."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from proof.strangers.crossing import size_of
from proof.strangers.lies import MODELS, PLACES, PRECISIONS, Lie, Setting, drawn, moved, right_taps, told, untouched

QUICK, SLOW, LONG = 24, 1000, 20

RIGHT = [
    Setting(model, kind, "float32", length, precision, sparse)
    for number, (model, kind) in enumerate(MODELS)
    for place, precision in enumerate(PRECISIONS)
    for length, sparse in (((12, 0), (5, 1), (24, 2), (12, 3))[(number + place) % 4],)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lies")


@pytest.mark.parametrize("setting", RIGHT, ids=str)
def test_the_truth_is_believed(setting: Setting, folder: Path):
    assert [row.tap for row in untouched(setting, folder).wrong] == []


@pytest.mark.parametrize("seed", range(QUICK))
def test_a_lie_is_found(seed: int, folder: Path):
    found = told(drawn(seed), folder)
    assert not found.missed, found.line


@pytest.mark.slow
@pytest.mark.parametrize("start", range(QUICK, SLOW, 47))
def test_lies_are_found(start: int, folder: Path):
    results = [told(drawn(seed), folder) for seed in range(start, min(start + 47, SLOW))]
    assert [found.line for found in results if found.missed] == []
    settings = {found.lie.setting for found in results}
    assert {
        setting: rows for setting in settings if (rows := [row.tap for row in untouched(setting, folder).wrong])
    } == {}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SLOW, SLOW + LONG))
def test_lies_in_long_traces_are_found(seed: int, folder: Path):
    lie = drawn(seed, long=True)
    assert [row.tap for row in untouched(lie.setting, folder).wrong] == []
    found = told(lie, folder)
    assert not found.missed, found.line


@pytest.mark.parametrize("place", PLACES)
def test_a_lie_is_as_large_as_it_is_drawn(place: str, folder: Path):
    """In float32 the move is what was asked for, and it is nowhere else."""
    for right, changed, name in _moved(place, folder):
        value = size_of(changed, right, name).value
        share = float(np.mean(changed != right))
        assert 0 < share < 1
        assert value == pytest.approx(0.5, rel=0.7)


@pytest.mark.parametrize("place", [place for place in PLACES if place not in ("head", "channel")])
def test_a_lie_in_a_row_is_largest_there(place: str, folder: Path):
    for right, changed, name in _moved(place, folder):
        whole, row, _ = size_of(changed, right, name)
        assert whole <= row


def _moved(place: str, folder: Path) -> Iterator[tuple[np.ndarray, np.ndarray, str]]:
    """Some taps, each right and with a lie in it."""
    setting = Setting("llama", "F32", "float32", 8, "f32", 0)
    taps = right_taps(setting, folder)
    for name in ("Qcur_rope-0", "kq-0", "ffn_out-1", "result_output"):
        yield taps[name], moved(taps[name], name, Lie(setting, 3, place, 0.5, False)), name
