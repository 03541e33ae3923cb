"""The quick tests: few, and nothing is left out of them that only the slow ones would show."""

from __future__ import annotations

from itertools import product

import pytest
from explaining import INJECTED
from quick import mark_slow, spread

CASES = [(f"{model}-{kind}-{bug}", frozenset({("model", model), ("kind", kind), ("bug", bug)}))
         for model, kind, bug in product("abcde", range(6), ("x", "y", "z"))]  # fmt: skip


def shown(names: list[str]) -> set:
    return set().union(*(values for name, values in CASES if name in names))


def test_every_value_is_shown_by_few_cases():
    chosen = spread(CASES)
    assert shown(chosen) == shown([name for name, _ in CASES])
    assert 6 <= len(chosen) <= 5 + 6 + 3
    assert len({tuple(name.split("-")[:2]) for name in chosen}) > 5  # not one model with all types


def test_the_choice_depends_on_the_names_alone():
    assert spread(CASES) == spread(CASES[::-1])
    assert set(spread(CASES)) - {CASES[0][0]} <= set(spread(CASES[1:]))


def test_what_has_no_parameters_stays():
    assert len(spread([("a", frozenset()), ("b", frozenset())])) == 2


class _Item:
    """A collected test."""

    def __init__(self, nodeid: str, **parameters: object) -> None:
        self.nodeid, self.marks = nodeid, list[str]()
        self.said_to_be_quick = False
        self.callspec = type("CallSpec", (), {"params": parameters})

    def get_closest_marker(self, name: str) -> bool:
        return name == "quick" and self.said_to_be_quick

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.name)


def test_the_rest_of_each_family_is_slow():
    items = [_Item(f"t.py::test_a[{name}]", name=name, options={})
             for name in ("qwen2.F16", "gpt2.F16", "llama.F16", "mpt.Q8_0", "llama.Q8_0")]  # fmt: skip
    alone = _Item("t.py::test_b[1]", name="qwen2.F16")
    mark_slow([*items, alone])
    quick = [item for item in items if item.marks != ["slow"]]
    assert {item.callspec.params["name"].partition(".")[2] for item in quick} == {"F16", "Q8_0"}
    assert (len(quick), alone.marks) == (2, [])


def test_a_test_may_say_which_of_its_cases_are_quick():
    items = [_Item(f"t.py::test_a[{number}]", number=number) for number in range(9)]
    items[4].said_to_be_quick = True
    mark_slow(items)
    assert [item.callspec.params["number"] for item in items if item.marks != ["slow"]] == [4]


def test_every_known_bug_is_injected_in_a_quick_test():
    """In more than one model and type of weights over all, and in less than half of the cases."""
    cases = [(f"tests/ext/explain/test_known_bugs.py::test_a_bug_is_named[{case.id}]",
              frozenset(enumerate((case.values[0].cause, *case.values[1:])))) for case in INJECTED]  # fmt: skip
    chosen = set(spread(cases))
    quick = [case.values for case, (name, _) in zip(INJECTED, cases, strict=True) if name in chosen]
    assert {injection.cause for injection, _, _ in quick} == {case.values[0].cause for case in INJECTED}
    for place in (1, 2):
        assert {values[place] for values in quick} == {case.values[place] for case in INJECTED}
    assert 7 * len(quick) < len(INJECTED)
