"""Mistakes that no known bug describes: each is found at its tap, and what was wrong with the op is read back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from proof.unlisted.bugs import Unlisted
from proof.unlisted.kept import KEPT
from proof.unlisted.more import UNLISTED
from proof.unlisted.runs import compared, is_said, judged

QUICK = {
    "squares without the last 4", "weight plus a half", "heads of V mixed up", "a row of V stale", "gate clamped",
    "K: head", "K: leak", "V: channels", "V: small",
    "V: a page twice", "K: half a head", "experts: next row",
    "a third term", "ids modulo 64", "first and third expert", "inputs left over", "last of a thread's share",
}  # fmt: skip
NAMES = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in UNLISTED | KEPT]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("unlisted")


@pytest.mark.parametrize("name", NAMES)
def test_an_unlisted_mistake_is_read_back(name: str, folder: Path):
    _check((UNLISTED | KEPT)[name], folder)


def _check(mistake: Unlisted, folder: Path, arithmetic: str = "float32") -> None:
    found = judged(mistake, folder, arithmetic)
    assert found.tap == mistake.tap
    assert all(says.endswith(" alone") for says in found.causes)  # what the list describes in all rows belongs there
    assert found.false == []
    assert is_said(mistake.sentence, (*found.sentences, *found.causes)), (found.sentences, found.causes)


@pytest.mark.parametrize("name", ["last of a thread's share", "a share twice"])
def test_a_wrong_part_is_told_from_an_engines_own_roundings(name: str, folder: Path):
    mistake = replace(UNLISTED[name], kind="Q8_0")
    _check(mistake, folder, "int8 of 32")


@pytest.mark.parametrize(
    "name",
    [
        "squares without the last 4",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("positions modulo 8", "remainder not added")),
    ],
)
def test_an_unlisted_mistake_is_read_back_through_the_graph(name: str, folder: Path):
    mistake = UNLISTED[name]
    comparison = compared(mistake, folder, engine="graph")
    assert comparison.leading.tap == mistake.tap
    assert is_said(mistake.sentence, comparison.profile), comparison.profile
