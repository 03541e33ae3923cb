"""A known bug's page: what it is, how it looks, what to do, and the right op in C, Rust and Python."""

from __future__ import annotations

from collections.abc import Iterator

from llamadiff.diagnose.mends.kinds import kind_of, right_code
from llamadiff.diagnose.registry import Bug, known_bugs
from llamadiff.system.errors import UserError


def explanation(name: str) -> str:
    """The page of a bug; of several (``a + b``, as reports name them), one after the other.

    Raises UserError for a name that no bug has.
    """
    bugs = [_named(part.strip()) for part in name.split("+")]
    return "\n\n".join("\n".join(_lines(bug)) for bug in bugs)


def _named(name: str) -> Bug:
    bug = known_bugs().get(name)
    if bug is None:
        raise UserError(f"{name}: no known bug is called so; llamadiff bugs lists them, llamadiff bugs WORD "
                        "finds those that mention a word")  # fmt: skip
    return bug


def _lines(bug: Bug) -> Iterator[str]:
    """One page; code stands in blocks that Markdown shows too."""
    kind = kind_of(bug)
    yield f"# {bug.name}"
    yield ""
    yield bug.about
    if bug.harmless:
        yield "It is a way of computing and no mistake: a tap that it explains is NOISE."
    yield ""
    yield f"How it looks: {kind.looks}"
    yield f"Ops of ggml: {', '.join(bug.ops)}"
    yield ""
    yield f"What to do: {bug.fix}."
    if bug.source:
        yield f"Known from: {bug.source}."
    yield ""
    yield f"Below is {kind.op} as it should be, for all bugs of this kind; take sizes and constants from the file."
    for language, code in right_code(kind):
        yield f"\n## {language}\n\n```{language.lower()}\n{code}\n```"
