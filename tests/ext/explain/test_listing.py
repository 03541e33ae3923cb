"""The list of known bugs, and how one is found in it."""

from __future__ import annotations

from command import run

from llamadiff.ext.explain.registry import known_bugs


def names(*words: str) -> list[str]:
    """The names in front of the lines, but for the last, which counts."""
    return [line.split()[0] for line in run("explain", *words).stdout.splitlines()[:-1]]


def test_all_bugs_are_listed_a_line_each():
    assert names() == list(known_bugs())


def test_bugs_are_searched_by_a_word():
    found = names("EPSILON")
    assert "norm-epsilon" in found
    assert "rope-layout" not in found
    done = run("explain", "no such thing")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "llamadiff: no such thing: no known bug is called so or mentions it; " \
        "llamadiff explain lists them all\n"  # fmt: skip


def test_a_name_gives_the_page_of_that_bug_alone():
    done = run("explain", "rope-layout")
    assert done.stdout.startswith("# rope-layout\n")
    assert "Known from: TinyLlama#24" in done.stdout
    assert "rope-base" not in done.stdout
