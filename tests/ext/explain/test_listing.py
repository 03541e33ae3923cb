"""The list of known bugs, and how one is found in it."""

from __future__ import annotations

from command import run

from llamadiff.ext.explain.listing import bugs_like
from llamadiff.ext.explain.registry import known_bugs


def test_one_bug_is_looked_up_by_its_name():
    done = run("bugs", "rope-layout")
    assert done.stdout.startswith("rope-layout\n")
    assert "known from TinyLlama#24" in done.stdout
    assert "rope-base" not in done.stdout


def test_bugs_are_searched_by_a_word():
    names = [bug.name for bug in bugs_like("EPSILON")]
    assert "norm-epsilon" in names
    assert "rope-layout" not in names
    assert len(bugs_like(None)) == len(known_bugs())
    done = run("bugs", "no such thing")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "llamadiff: no such thing: no known bug is called so or mentions it; " \
        "llamadiff bugs lists them all\n"  # fmt: skip
