"""The page that a report is written on: one console, its width, its alphabet, its colours; paragraphs, tables, grids.

A verdict has a background of its own, and all else the terminal's own colours. No single colour of text can be read on
dark, light and Solarized backgrounds alike, and dim text on none of them for sure. So nothing is dim, nothing is told
by a colour alone, and a badge brings its own background with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.text import Text

from llamadiff.judge.verdict import MATCH, NOISE, UNCHECKED, WRONG
from llamadiff.report.terminal import escape
from llamadiff.report.terminal.columns import Column, table

MOST_COPIED = 1000  # characters of a line that is there to be copied
PROSE = 100  # cells; longer lines are hard to read
LABEL = 9  # cells: the labels of paragraphs, and the room after them

# What the renderer itself writes beyond ASCII, and one ASCII character for each.
_PLAIN = str.maketrans("✗·×▸•│─━╸→", "x.x>*|-=->")

STRONG = "bold"
# Colours of the cube of 256, which are the same under every theme; the first 16 are not.
BADGES = {
    MATCH: "bold color(231) on color(28)",
    NOISE: "bold color(231) on color(24)",
    WRONG: "bold color(231) on color(160)",
    UNCHECKED: "bold color(16) on color(220)",
}
FEW_COLOURS = "bold reverse"  # where there are only a theme's 16 colours, or two
MARKS = {MATCH: "·", NOISE: "~", WRONG: "✗", UNCHECKED: "?"}
STYLES = (*BADGES.values(), FEW_COLOURS, STRONG)


class Page:
    """Where sections write their lines. Data goes through ``data`` or ``quote``, never straight into a line."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.width = max(1, console.width)
        self.ascii_only = console.options.ascii_only
        self._is_blank = False  # the line before

    def data(self, value: object, limit: int = 200) -> str:
        return escape.escape_line(str(value), limit, ascii_only=self.ascii_only)

    def as_it_is(self, text: str, limit: int = 1000) -> str:
        """A line whose backslashes are its own."""
        return escape.escape_line(text, limit, ascii_only=self.ascii_only, plain="\\")

    def quote(self, value: str, limit: int = 24) -> str:
        return escape.quote(value, limit, ascii_only=self.ascii_only)

    def names(self, names: Iterable[str], most: int = 6) -> str:
        """The first few names, and how many more there are."""
        every = list(names)
        more = f" and {len(every) - most} more" if len(every) > most else ""
        return ", ".join(self.data(name) for name in every[:most]) + more

    def style_of(self, verdict: str) -> str:
        """A verdict's style on this console."""
        return BADGES[verdict] if self.console.color_system in ("256", "truecolor") else FEW_COLOURS

    def emphasis(self, verdict: str) -> str:
        """The style of a verdict within a table: what is right has none."""
        return self.style_of(verdict) if verdict in (WRONG, UNCHECKED) else ""

    def badge(self, verdict: str) -> Text:
        """A verdict as the first word of a line, with room after it."""
        word = verdict.upper()
        if self.console.color_system is None:
            return Text(f"{word}  ")
        return Text.assemble((f" {word} ", self.style_of(verdict)), "  ")

    def put(self, line: str | Text) -> None:
        """Print one line, as it is."""
        line = _text(line).copy()
        line.rstrip()
        if self.ascii_only:
            line.plain = line.plain.translate(_PLAIN)
        self.console.print(line)
        self._is_blank = False

    def print_unbroken(self, text: str) -> None:
        """Print a line that is there to be copied: longer than the page, it is broken by the terminal alone."""
        self.console.print(Text(self.data(text, MOST_COPIED)), soft_wrap=True)
        self._is_blank = False

    def blank(self) -> None:
        """An empty line between sections; one, however many of them had nothing to say."""
        if not self._is_blank:
            self.console.print()
        self._is_blank = True

    def paragraph(self, label: str | Text, body: str | Text) -> None:
        """A label and text wrapped beside it, every line indented to the first one's start."""
        label, width = _text(label), min(self.width, PROSE)
        beside = width - label.cell_len >= 24
        indent = label.cell_len if beside else min(2, width - 1)
        if not beside:
            self.put(label)
        for number, part in enumerate(_text(body).wrap(self.console, width - indent)):
            self.put(Text.assemble(label if beside and number == 0 else " " * indent, part))

    def print_labelled(self, word: str, body: str | Text) -> None:
        """A paragraph with one of the labels that stand under each other."""
        self.paragraph(Text(word.ljust(LABEL), STRONG), body)

    def table(
        self, titles: Sequence[str], lines: Iterable[Sequence[str]], ranks: Sequence[int] = (), limit: int = 200
    ) -> None:
        """Data in columns, with the ranks of a ``Column``; under a title that begins with > it stands on the right."""
        columns = [
            Column(title.removeprefix(">"), [Text(self.data(cell, limit)) for cell in cells], rank, title[:1] != ">")
            for title, cells, rank in zip(titles, zip(*lines, strict=True), ranks or range(len(titles)), strict=True)
        ]
        self.columns(columns)

    def columns(self, columns: Sequence[Column]) -> None:
        """Those columns that fit."""
        for line in table(columns, self.width):
            self.put(line)

    def grid(self, heads: Sequence[str], cells: Sequence[Text], gap: int) -> None:
        """As many cells a line as fit, one under the other; a line begins with the head of its first cell."""
        width = max(cell.cell_len for cell in cells) + gap
        each = max(1, (self.width - len(heads[0]) + gap) // width)
        for start in range(0, len(cells), each):
            line = Text(heads[start])
            for cell in cells[start : start + each]:
                line.append_text(cell).append(" " * (width - cell.cell_len))
            self.put(line)


def _text(words: str | Text) -> Text:
    return Text(words) if isinstance(words, str) else words
