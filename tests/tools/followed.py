"""A plugin of pytest's: what became of each test, what it took, and, where coverage follows, which lines it ran."""

from __future__ import annotations

import json
import os
import resource
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


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Its processor seconds, those of its children too."""
    before = os.times()
    worst = ["passed"]
    item.stash[_WORST] = worst
    if following := _coverage():
        following.switch_context(item.nodeid)
    yield
    if following:
        following.switch_context("")
    after = os.times()
    about = {
        "test": item.nodeid, "outcome": worst[0], "seconds": sum(after[:4]) - sum(before[:4]),
        "wall": after.elapsed - before.elapsed, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }  # fmt: skip
    with SAID.open("a", encoding="utf-8") as file:
        file.write(json.dumps(about) + "\n")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A test is what its worst part is."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.outcome != "passed":
        item.stash[_WORST][0] = report.outcome


_WORST = pytest.StashKey[list[str]]()
