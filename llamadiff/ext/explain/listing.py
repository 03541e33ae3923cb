"""The known bugs as a list, and the page of each."""

from __future__ import annotations

from collections.abc import Iterator

from rich.padding import Padding
from rich.text import Text

from llamadiff.ext.explain.mends.kinds import kind_of, right_code
from llamadiff.ext.explain.registry import Bug, known_bugs
from llamadiff.report.terminal.report import make_console
from llamadiff.system.errors import UserError


def bugs_like(word: str | None) -> list[Bug]:
    """The bug of this name, else those in whose name or text the word is; all without one.

    Raises UserError where there is none.
    """
    known = known_bugs()
    if word is None or word in known:
        return list(known.values()) if word is None else [known[word]]
    found = [bug for bug in known.values() if word.lower() in " ".join((bug.name, bug.about, bug.fix)).lower()]
    if not found:
        raise UserError(f"{word}: no known bug is called so or mentions it; llamadiff bugs lists them all")
    return found


def print_bugs(word: str | None = None) -> None:
    """Known bugs: each one's name, what it is, where it shows, what to do."""
    console = make_console()
    known = bugs_like(word)
    for bug in known:
        console.print(Text.assemble((bug.name, "bold"), "  no mistake: noise" if bug.harmless else ""))
        for line in (
            bug.about,
            f"shows at {', '.join(bug.ops)}",
            f"do: {bug.fix}",
            bug.source and f"known from {bug.source}",
        ):
            if line:
                console.print(Padding(Text(line), (0, 0, 0, 4)))
    if word is None:
        count = sum(not bug.harmless for bug in known)
        console.print(Text(f"{count} known bugs, and {len(known) - count} ways of computing that are none"))


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
