"""A plugin of pytest's: what became of each test, what it took, and, where coverage follows, which lines it ran."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SAID = Path(os.environ["FOLLOWED"]) / f"{os.getpid()}.jsonl"


def _coverage() -> Any:
    if not os.environ.get("COVERAGE_PROCESS_START"):
        return None
    import coverage

    return coverage.Coverage.current()


def _write(test: str, outcome: str, seconds: float = 0.0) -> None:
    with SAID.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"test": test, "outcome": outcome, "seconds": seconds}) + "\n")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Its processor seconds, those of its children too; a test of which nothing else is said later was killed in it."""
    before = os.times()
    worst = ["passed"]
    item.stash[_WORST] = worst
    _write(item.nodeid, "hangs")
    if following := _coverage():
        following.switch_context(item.nodeid)
    yield
    if following:
        following.switch_context("")
    _write(item.nodeid, worst[0], sum(os.times()[:4]) - sum(before[:4]))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A test is what its worst part is."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.outcome != "passed":
        item.stash[_WORST][0] = report.outcome


_WORST = pytest.StashKey[list[str]]()
