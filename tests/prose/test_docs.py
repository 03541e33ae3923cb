"""What the documents say is so: folders, slices, steps, links, generated tables, targets of the Makefile."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from places import ROOT
from tools import tables

from llamadiff import plugins
from llamadiff.cli.app import app

PAGES = [
    ROOT / name
    for name in (
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "captures/README.md",
        "skills/llamadiff/SKILL.md",
    )
] + [page for each in (".", "symptoms", "tutorials") for page in sorted((ROOT / "docs" / each).glob("*.md"))]
ARCHITECTURE = (ROOT / "docs" / "ARCHITECTURE.md").read_text("utf-8")
LINK = re.compile(r"\]\(([^)#:\s]*)(#[^)]*)?\)")
HEADING = re.compile("^#+ (.*)$", re.MULTILINE)
CODE = re.compile(r"^(?:    |\$ )(.*)$|`([^`\n]+)`", re.MULTILINE)


def table(section: str) -> list[list[str]]:
    """The rows of all tables in a section, without their heads."""
    text = ARCHITECTURE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return [row for row, under in zip(rows, [*rows[1:], [""]], strict=True) if "---" not in (row[0], under[0])]


def named(path: Path) -> set[str]:
    """What a file defines: its functions and methods."""
    tree = ast.parse(path.read_text("utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def anchors(path: Path) -> set[str]:
    """What a link may point at within a page, as GitHub makes it of the headings."""
    return {
        re.sub("[^a-z0-9 -]", "", heading.lower()).replace(" ", "-")
        for heading in HEADING.findall(path.read_text("utf-8"))
    }


def test_every_folder_of_the_core_and_every_slice_is_told_of() -> None:
    rows = table("The core and its slices")
    folders = {path.parent.name for path in (ROOT / "llamadiff").glob("*/__init__.py")} - {"ext"}
    needs = {name: {*slice_.needs} for name, slice_ in plugins.slices().items()}
    assert folders | needs.keys() == {row[0].strip("`") for row in rows if row[0].startswith("`")}
    assert needs == {row[0].strip("`"): {*re.findall("`([a-z]+)`", row[2])} for row in rows if len(row) > 2}


def test_every_step_of_the_way_names_a_function_where_it_is() -> None:
    steps = table("The way of a tap's value")
    for _, functions, files in steps:
        defined = set[str]()
        for file in re.findall("`([^`]+)`", files):
            path = ROOT / file if file.startswith("reference/") else ROOT / "llamadiff" / file
            defined |= named(path)
        assert set(re.findall("`([^`]+)`", functions)) <= defined, files
    assert 8 <= len(steps) <= 12


def test_each_word_is_explained_once() -> None:
    words = [row[0] for row in table("Words")]
    assert len(words) == len(set(words))
    assert {"tap", "lane", "policy", "span", "source", "edit", "node", "drift", "noise"} <= set(words)


@pytest.mark.parametrize("name", tables.TABLES)
def test_generated_tables_are_current(name: str) -> None:
    assert tables.current(name) == (tables.DOCS / name).read_text("utf-8"), "make docs"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for file, anchor in LINK.findall(page.read_text("utf-8")):
        target = page.parent / file if file else page
        assert target.exists(), file
        assert not anchor or anchor[1:] in anchors(target), f"{file}{anchor}"


def test_every_page_is_reached_from_readme() -> None:
    reached, pending = set[Path](), [ROOT / "README.md"]
    while pending:
        page = pending.pop()
        if page.suffix == ".md" and page not in reached:
            reached.add(page)
            pending += [(page.parent / file).resolve() for file, _ in LINK.findall(page.read_text("utf-8")) if file]
    assert set(PAGES) <= reached


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 120


def test_make_lists_every_target_with_what_it_does() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = re.search("^[.]PHONY: (.*)$", makefile, re.MULTILINE)
    assert targets is not None
    shown = subprocess.run(
        ["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True, encoding="utf-8"
    ).stdout
    assert [line.split()[0] for line in shown.splitlines()] == targets[1].split()
    assert all(len(line.split()) > 1 for line in shown.splitlines())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_targets_that_are_named_exist(page: Path) -> None:
    targets = set(re.findall("^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    named = re.findall("(?:`|^ {4})make ([a-z-]+)", page.read_text("utf-8"), re.MULTILINE)
    assert set(named) <= targets


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every command line of llamadiff's that a page shows, behind its first word."""
    for block, span in CODE.findall(page.read_text("utf-8")):
        called = re.search(r"(?:^|/|=\S+ )llamadiff (.*)", block or span)
        if called:
            line = called[1].partition("   ")[0]  # a remark stands further right
            yield shlex.split(line.replace("'s ", " ").rstrip("\\"), comments=True)


def shown_options(words: list[str]) -> Iterator[str]:
    for word in words:
        if word == "--":
            return
        if word.startswith("--"):
            yield word.partition("=")[0]


@cache
def options() -> dict[str, set[str]]:
    """Those of every command."""
    group: Any = typer.main.get_command(app)
    return {name: {each for of in one.params for each in of.opts} for name, one in group.commands.items()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_that_are_shown_have_these_options(page: Path) -> None:
    for command, *words in commands(page):
        if command.isalpha() and command.islower():
            assert {*shown_options(words)} <= options()[command], (command, words)


def test_every_command_is_in_the_table_of_all() -> None:
    text = (ROOT / "docs" / "commands.md").read_text("utf-8").split("## All commands")[1].split("## Options")[0]
    assert {*re.findall("`([a-z]+)[ `]", text)} >= options().keys()


def test_the_architectures_of_the_reference_engine_are_named() -> None:
    models = {path.stem.replace("_", "-") for path in (ROOT / "reference/llamaref/models").glob("[a-z]*.py")}
    named = (ROOT / "docs" / "limits.md").read_text("utf-8").split("others are judged")[0]
    assert models == {*re.findall("`([a-z0-9-]+)`", named)}
    assert f"knows {len(models)} architectures" in (ROOT / "README.md").read_text("utf-8")


def test_the_commands_that_run_llama_cpp_are_all_named() -> None:
    text = (ROOT / "docs" / "llama-cpp.md").read_text("utf-8").split("`--llama-cpp` is an option of")[1].split(". ")[0]
    having = {name for name, its in options().items() if "--llama-cpp" in its}
    assert {*re.findall("`([a-z]+)`", text)} == having - {"watch"}  # what it has of it is said on its own page
