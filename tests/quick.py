"""Which tests are quick: of each parametrized test, as many cases as show every value of every parameter once.

The rest is marked slow: ``make test`` leaves it out, ``make test-all`` runs it. Of cases that would show the same, a
checksum of their names decides, so that the values meet in all sorts of combinations, and in the same ones every day.
Of a test with dear cases a ``quick`` mark says which few are.
Random models are told apart by their type of weights, injected mistakes by their cause.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from zlib import crc32

import pytest
from models.random_models import NAMES
from proof.injected.base import Injection

CHOSEN = Path(__file__).with_name("quick.json")
ROOM = re.compile("^tests/(ext/)?[^/]+/")


def mark_slow(items: Iterable[pytest.Item]) -> None:
    """Mark all cases that show nothing new."""
    families: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        families[item.nodeid.partition("[")[0]].append(item)
    for family in families.values():
        said = {item.nodeid for item in family if item.get_closest_marker("quick")}
        quick = said or set(spread([(item.nodeid, _values(item)) for item in family]))
        for item in family:
            if item.nodeid not in quick:
                item.add_marker(pytest.mark.slow)


def spread(cases: Sequence[tuple[str, frozenset[Hashable]]]) -> list[str]:
    """The names of cases that show all values between them: each shows one that those before it do not."""
    seen: set[Hashable] = set()
    chosen = []
    for name, values in sorted(cases, key=lambda case: checksum(case[0])):
        if not values <= seen or not values:
            chosen.append(name)
            seen |= values
    return chosen


def checksum(name: str) -> int:
    """Of a test's name without its room: one that moves to another keeps its quick cases."""
    return crc32(ROOM.sub("tests/", name).encode())


def _values(item: pytest.Item) -> frozenset[Hashable]:
    callspec = getattr(item, "callspec", None)
    parameters = callspec.params if callspec is not None else {}
    return frozenset((name, _comparable(value)) for name, value in parameters.items())


def _comparable(value: object) -> Hashable:
    if isinstance(value, str) and value in NAMES:
        return value.partition(".")[2]  # qwen2.F16
    if isinstance(value, Injection):
        return value.cause
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value


def parted(test: str) -> tuple[str, str, str]:
    """A test's file, function and case."""
    file, _, rest = test.partition("::")
    function, _, case = rest.partition("[")
    return file, function, case.removesuffix("]")
