"""Foreign text as GitHub renders it: shown as it is, and never a tag, a link, a mention or a reference to an issue.

Within a code span GitHub reads nothing. So names and texts of tokens are code spans; of a sentence the words that it
would read are code spans too, and of the others every character of Markdown is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from llamadiff.report.formats import About, command_line
from llamadiff.report.terminal.escape import escape_line, quote

MOST = 65_536  # characters that GitHub takes in one issue or comment
_LEFT_OUT = "*The rest is left out: it would not fit a GitHub issue. The JSON report has all of it.*"
# Mentions, issues, commits, addresses, mathematics and emoji by name, tags; and names, which are nicer as code.
_READ = re.compile(
    r"[@#<>$`]|://|www\.|\bGH-[0-9]|\b[0-9a-f]{7,40}\b|:[\w+-]+:|xmpp:|mailto:|[a-z0-9]_[a-z0-9]", re.IGNORECASE
)
_ESCAPED = re.compile(r"([\\*_{}\[\]~&!])")
_WORDS = re.compile(r"[\w.-]+\[[\d, ]*\]|[^ ]+| +")  # a place such as kq-0[3, 0, 2] is one
_WORD = re.compile(r"(?P<before>[(\"']*)(?P<word>.*?)(?P<after>[)\"',.;:?]*)")


def prose(text: str, limit: int = 2000) -> str:
    """A sentence with foreign words in it, on one line; cut after ``limit`` cells."""
    return "".join(map(_word, _WORDS.findall(escape_line(text, limit))))


def _word(word: str) -> str:
    if not _READ.search(word):
        return _escape(word)
    parts = _WORD.fullmatch(word)
    if parts is None or not parts["word"] or _is_unbalanced(parts["word"]):
        return _span(word)
    return _escape(parts["before"]) + _span(parts["word"]) + _escape(parts["after"])


def _is_unbalanced(word: str) -> bool:
    """Whether a bracket that belongs to a word would stand outside of its code span."""
    return word.count("(") != word.count(")")


def _escape(text: str) -> str:
    return _ESCAPED.sub(r"\\\1", text)


def code(text: str, limit: int = 200) -> str:
    """A name as a code span."""
    return _span(escape_line(text, limit) or '""')


def token(text: str, limit: int = 24) -> str:
    """A text whose blanks matter, in quotes in a code span."""
    return _span(quote(text, limit))


def _span(text: str) -> str:
    fence = _fence(text, 1)
    room = " " if text[:1] in "` " or text[-1:] in "` " else ""
    return f"{fence}{room}{text}{room}{fence}"


def _fence(text: str, least: int) -> str:
    """Backticks that do not occur in a text."""
    runs = [len(run) for run in re.findall("`+", text)]
    return "`" * max(least, 1 + max(runs, default=0))


def block(text: str, language: str = "") -> str:
    """Lines of code."""
    fence = _fence(text, 3)
    return f"{fence}{language}\n{text}\n{fence}"


def again(about: About) -> Iterator[str]:
    """The command that made a report, where there was one."""
    line = command_line(about.command)
    if line is not None:
        yield block(line, "sh")


def table(titles: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """A table of cells that are Markdown already, without columns that nothing fills.

    Under a title that begins with a > cells stand on the right.
    """
    columns = [column for column in zip(titles, *lines, strict=True) if any(column[1:])]
    heads = [column[0].removeprefix(">") for column in columns]
    rules = ["--:" if column[0].startswith(">") else "---" for column in columns]
    return "\n".join(map(_line, (heads, rules, *zip(*(column[1:] for column in columns), strict=True))))


def _line(cells: Iterable[str]) -> str:
    """A line of a table. Before a bar of its own text there is an even number of backslashes, as they come in pairs."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def fold(title: str, body: str) -> str:
    """What is opened by a click."""
    return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>"


def fit_sections(sections: Iterable[str]) -> str:
    """The first sections, as many as fit, and a line that some were left out."""
    kept = list[str]()
    for section in sections:
        kept.append(section)
        if len(_join_sections(kept)) > MOST:
            while len(_join_sections([*kept, _LEFT_OUT])) > MOST:
                kept.pop()
            return _join_sections([*kept, _LEFT_OUT])
    return _join_sections(kept)


def _join_sections(sections: Sequence[str]) -> str:
    return "\n\n".join(sections) + "\n"
