"""Mistakes that no known bug describes: each is found at its tap, and what was wrong with the op is read back."""

from __future__ import annotations

from pathlib import Path

import pytest

from unlisted.bugs import UNLISTED
from unlisted.runs import Judged, judged
from unlisted.said import says

SEARCHED = {"RoPE", "softmax"}  # where pairs of known bugs take long to be ruled out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("unlisted")


@pytest.mark.slow
@pytest.mark.parametrize("name", UNLISTED)
def test_an_unlisted_mistake_is_read_back(name: str, folder: Path):
    _check(judged(UNLISTED[name], folder))


def _check(found: Judged) -> None:
    mistake = found.mistake
    assert found.tap == mistake.tap
    assert found.causes == []  # a mistake that the list describes belongs there
    assert found.false == []
    assert says(mistake.parameter, mistake.value, found.sentences), found.sentences
