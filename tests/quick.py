"""Which tests are quick: those of quick.json, which finds what all find, and those that are newer than it.

tools/mutants.py chooses them. What it knew and did not choose is marked slow: ``make test`` leaves it out, ``make
test-all`` runs it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

CHOSEN = Path(__file__).with_name("quick.json")  # file -> function -> its quick cases; "" is that of one without


def read_quick_cases() -> Mapping[str, Mapping[str, list[str]]]:
    """Of each file and function of tests that was known the cases that are quick."""
    return {} if os.environ.get("LLAMADIFF_QUICK") == "all" else json.loads(CHOSEN.read_text("utf-8"))


def mark_slow(items: Iterable[pytest.Item], quick: Mapping[str, Mapping[str, list[str]]]) -> None:
    """Mark what was known and not chosen."""
    for item in items:
        file, function, case = split_test_id(item.nodeid)
        if case not in quick.get(file, {}).get(function, [case]):
            item.add_marker(pytest.mark.slow)


def split_test_id(test: str) -> tuple[str, str, str]:
    """A test's file, function and case."""
    file, _, rest = test.partition("::")
    function, _, case = rest.partition("[")
    return file, function, case.removesuffix("]")
