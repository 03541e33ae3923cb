"""The shared models: what is skipped without them is counted, and none of them is forgotten."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import shared_models


def test_without_them_the_suites_that_want_one_are_counted(monkeypatch):
    monkeypatch.setattr(shared_models, "EVERY", (Path("/nowhere.gguf"),))
    assert shared_models.count() == "shared models: none: 8 suites are skipped in part"
    assert shared_models.suites() == {
        "test_architectures", "test_backends", "test_diagnosis", "test_graph", "test_graph_bugs", "test_nodes",
        "test_normal", "test_shared_models",
    }  # fmt: skip


def test_those_that_are_there_are_counted(monkeypatch, small_model):
    monkeypatch.setattr(shared_models, "EVERY", (small_model(), small_model("qwen2")))
    assert shared_models.count() == "shared models: 2"
    monkeypatch.setattr(shared_models, "EVERY", (small_model(), Path("/nowhere.gguf")))
    assert shared_models.count() == "shared models: 1 of 2"


def test_the_count_heads_a_run(pytestconfig):
    assert shared_models.count() in pytestconfig.hook.pytest_report_header(config=pytestconfig, start_path=Path())


def test_who_asks_for_a_missing_one_is_skipped_with_a_reason(small_model):
    assert shared_models.existing(small_model()) == small_model()
    with pytest.raises(pytest.skip.Exception, match="the shared model x is not beside the checkout"):
        shared_models.existing(Path("/nowhere/x.gguf"))


@pytest.mark.skipif(not shared_models.FOLDER.exists(), reason="the shared models are not beside the checkout")
def test_every_one_that_is_there_is_tested():
    assert set(shared_models.FOLDER.rglob("*.gguf")) == set(shared_models.EVERY)


def test_no_suite_looks_for_them_by_itself():
    """A suite with a list of its own would shrink where they are missing."""
    own = re.compile(r'"shared" / "models"')
    found = {path.name for path in shared_models.TESTS.rglob("*.py") if own.search(path.read_text())}
    assert found == {"shared_models.py", "test_shared_models.py"}
