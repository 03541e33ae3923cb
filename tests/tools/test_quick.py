"""The quick tests: those that were chosen and those that are new; and how the choice is made."""

from __future__ import annotations

import ast
import json

import pytest
from places import ROOT
from quick import CHOSEN, mark_slow, split_test_id

from tools import mutants


class _Item:
    """A collected test."""

    def __init__(self, nodeid: str) -> None:
        self.nodeid, self.marks = nodeid, list[str]()

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.name)


def test_what_was_known_and_not_chosen_is_slow():
    quick = {"t.py": {"test_a": ["x", "y-[1]"], "test_b": [""], "test_c": []}}
    slow = {"t.py::test_a[z]", "t.py::test_c"}
    names = ["t.py::test_a[x]", "t.py::test_a[y-[1]]", "t.py::test_b", "t.py::test_new[z]", "other.py::test_c", *slow]
    items = [_Item(name) for name in names]
    mark_slow(items, quick)
    assert {item.nodeid for item in items if item.marks} == slow


def test_what_was_chosen_is_there():
    """A file or a function that was renamed is new, and all of it quick, until it is chosen from again."""
    for file, functions in json.loads(CHOSEN.read_text("utf-8")).items():
        parsed = ast.walk(ast.parse((ROOT / file).read_text("utf-8")))
        named = {each.name for each in parsed if isinstance(each, ast.FunctionDef)}
        assert functions.keys() <= named, file


def test_a_test_has_a_file_a_function_and_a_case():
    assert split_test_id("tests/a.py::test_b[c::d[1]-e]") == ("tests/a.py", "test_b", "c::d[1]-e")
    assert split_test_id("tests/a.py::test_b") == ("tests/a.py", "test_b", "")


def test_a_cover_shows_all_as_often_as_is_wanted_and_takes_the_cheap():
    shows = {"dear": "abcd", "ab": "ab", "cd": "cd", "a": "a", "none": ""}
    cost = {"dear": 9.0, "ab": 1.0, "cd": 1.0, "a": 0.5, "none": 0.0}
    once = dict.fromkeys("abcd", (1, 1.0))
    assert sorted(mutants.cover(shows, cost, once, 99)) == ["ab", "cd"]
    assert sorted(mutants.cover(shows, cost, {**once, "a": (2, 1.0)}, 99)) == ["a", "ab", "cd"]
    assert sorted(mutants.cover(shows, cost, dict.fromkeys("abcd", (9, 1.0)), 99)) == ["a", "ab", "cd", "dear"]
    assert sorted(mutants.cover(shows, cost, once, 1.2)) == ["ab"]
    assert sorted(mutants.cover(shows, cost, {**once, "d": (1, 9.0)}, 1.2)) == ["cd"]  # what is worth most


def test_a_mutant_is_found_by_the_tests_that_fail_or_end_over_it(tmp_path, monkeypatch):
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    place = tmp_path / "copy"
    (place / "tests/tools").mkdir(parents=True)
    for name in ("followed.py", "__init__.py"):
        (place / "tests/tools" / name).write_text((ROOT / "tests/tools" / name).read_text("utf-8"), "utf-8")
    (place / "pyproject.toml").write_text("[tool.pytest.ini_options]\n", "utf-8")
    (tmp_path / "m.py").write_text("ONE = 1\n", "utf-8")
    tests = {"right": "assert m", "wrong": "assert m.ONE == 1", "without_end": "m.ONE == 1 or os._exit(9)"}
    code = "\n".join(f"def test_{name}():\n    {line}" for name, line in tests.items())
    (place / "test_m.py").write_text(f"import os\nimport m\n{code}\n", "utf-8")
    (mutant,) = mutants.mutants_of(tmp_path / "m.py")
    took = {f"test_m.py::test_{name}": number / 10 for number, name in enumerate(tests)}
    found = mutants.run_over(mutant, list(took), took, place)
    assert set(found.killers) == {"test_m.py::test_wrong", "test_m.py::test_without_end"}
    assert (place / "m.py").read_text("utf-8") == "ONE = 1\n"


EDITED = {
    "x < y": "x <= y", "x + y": "x - y", "x and y": "x or y", "not x": "x", "True": "False", "7": "8", "2.0": "3.0",
    "x if y else z": "x if False else z",
}  # fmt: skip


@pytest.mark.parametrize(("before", "after"), EDITED.items())
def test_an_expression_is_edited_in_its_place(before, after, tmp_path, monkeypatch):
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    text = f"# ünbroken\ndef f(x: 'int < 3', y, z):\n    found = {before}  # kept\n    return found\n"
    (tmp_path / "m.py").write_text(text, "utf-8")
    (tmp_path / "copy").mkdir()
    texts = set()
    for mutant in mutants.mutants_of(tmp_path / "m.py"):
        mutant.apply(tmp_path / "copy")
        texts.add((tmp_path / "copy/m.py").read_text("utf-8"))
    parsed = {ast.unparse(ast.parse(each)) for each in texts}
    assert ast.unparse(ast.parse(text.replace(before, after))) in parsed
    assert all("# ünbroken" in each and "'int < 3'" in each and "# kept" in each for each in texts)


def test_every_mutant_of_the_sources_can_be_compiled_and_is_another_program():
    for mutant in mutants.all_mutants()[:300]:
        source = (ROOT / mutant.file).read_bytes()
        end = mutant.offset + len(mutant.before.encode())
        changed = source[: mutant.offset] + mutant.after.encode() + source[end:]
        assert ast.unparse(ast.parse(changed)) != ast.unparse(ast.parse(source)), mutant.name
