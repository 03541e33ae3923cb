"""The known bugs as a list, and the page of each."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from difflib import get_close_matches
from textwrap import shorten

from rich.text import Text

from llamadiff.ext.explain.mends.kinds import LANGUAGES, kind_of, right_code
from llamadiff.ext.explain.registry import Bug, known_bugs
from llamadiff.report.terminal.report import make_console
from llamadiff.system.errors import UserError

NAMES = 26  # columns of the longest
ALIKE = {("c++", "C"), ("cpp", "C"), ("cc", "C")}  # languages that read another one's page


def print_explanation(name: str | None, language: str | None = None) -> None:
    """The page of a bug, laid out on a terminal; elsewhere as Markdown. Without a name, or with a word, a line for each
    bug that has it.

    Raises UserError for a word that no bug has, or a language that no page has.
    """
    console = make_console()
    if name is None or (language is None and "+" not in name and name not in known_bugs()):
        found = _mentioning(name)
        for bug in found:
            about = shorten(bug.about, max(console.width - NAMES, NAMES) - 1, placeholder=" ...")
            console.print(Text.assemble((f"{bug.name:<{NAMES}} ", "bold"), about))
        count = sum(not bug.harmless for bug in found)
        console.print(f"{count} known bugs, {len(found) - count} harmless ways; llamadiff explain NAME prints a page")
        return
    text = explanation(name, language)
    if console.is_terminal:
        from rich.markdown import Markdown

        console.print(Markdown(text, code_theme="ansi_dark"))
    else:
        console.file.write(f"{text}\n")


def _mentioning(word: str | None) -> list[Bug]:
    """The bugs in whose name or text a word is; all without one."""
    known = known_bugs().values()
    found = [bug for bug in known if (word or "").lower() in " ".join((bug.name, bug.about, bug.fix)).lower()]
    if not found:
        near = get_close_matches(str(word), known_bugs(), 1)
        hint = f"did you mean {near[0]}?" if near else "llamadiff explain lists them all"
        raise UserError(f"{word}: no known bug is called so or mentions it; {hint}")
    return found


def explanation(name: str, language: str | None = None) -> str:
    """The page of a bug as Markdown, with the right op in all languages or one; of several (``a + b``, as reports name
    them), one after the other.

    Raises UserError for a name that no bug has, or a language that no page has.
    """
    languages = list(LANGUAGES) if language is None else [_language(language)]
    bugs = [_named(part.strip()) for part in name.split("+")]
    return "\n\n".join("\n".join(_lines(bug, languages)) for bug in bugs)


def _language(asked: str) -> str:
    """A language of the pages, by its name or the ending of its files."""
    for language, file in LANGUAGES.items():
        if asked.lower() in (language.lower(), file.rpartition(".")[2]) or (asked.lower(), language) in ALIKE:
            return language
    raise UserError(f"{asked}: the right ops are in {', '.join(each.lower() for each in LANGUAGES)}; give one of these")


def _named(name: str) -> Bug:
    bug = known_bugs().get(name)
    if bug is None:
        raise UserError(f"{name}: no known bug is called so; llamadiff explain lists them, llamadiff explain WORD "
                        "finds those that mention a word")  # fmt: skip
    return bug


def _lines(bug: Bug, languages: Collection[str]) -> Iterator[str]:
    """One page; code stands in blocks that Markdown shows too."""
    kind = kind_of(bug)
    yield f"# {bug.name}"
    yield ""
    yield bug.about
    if bug.harmless:
        yield "It is a way of computing and no mistake: a tap that it explains is NOISE."
    yield ""
    yield f"How it looks: {kind.looks}"
    yield ""
    yield f"Ops of ggml: {', '.join(bug.ops)}"
    yield ""
    yield f"What to do: {bug.fix}."
    if bug.source:
        yield ""
        yield f"Known from: {bug.source}."
    yield ""
    yield f"Below is {kind.op} as it should be, for all bugs of this kind; take sizes and constants from the file."
    for language, code in right_code(kind):
        if language in languages:
            yield f"\n## {language}\n\n```{language.lower()}\n{code}\n```"
