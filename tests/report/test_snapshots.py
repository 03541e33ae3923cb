"""What reports say, word for word: on a terminal, and in files for machines."""

from __future__ import annotations

import pytest
from syrupy.assertion import SnapshotAssertion

from llamadiff.report.formats import About
from llamadiff.report.json import to_csv, to_json
from report.made_up import REPORTS, SHAPES
from report.snapshots import Csv, Json, Text, printed


@pytest.mark.parametrize("name", REPORTS)
def test_short(name: str, snapshot: SnapshotAssertion) -> None:
    assert printed(REPORTS[name]) == snapshot(extension_class=Text)


def test_deep(snapshot: SnapshotAssertion) -> None:
    assert printed(SHAPES["eighty layers, rounded"], 100) == snapshot(extension_class=Text)


@pytest.mark.parametrize("name", ["decode steps", "missing taps"])
def test_full(name: str, snapshot: SnapshotAssertion) -> None:
    assert printed(REPORTS[name], 120, full=True) == snapshot(extension_class=Text)


def test_json(snapshot: SnapshotAssertion, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamadiff.report.json.__version__", "1")
    about = About(("llamadiff", "compare", "tiny.gguf", "it's"))
    assert to_json(REPORTS["several causes"], about) == snapshot(extension_class=Json)


def test_csv(snapshot: SnapshotAssertion) -> None:
    assert to_csv(REPORTS["missing taps"], About()) == snapshot(extension_class=Csv)
