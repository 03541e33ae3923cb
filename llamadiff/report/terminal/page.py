"""The page that a report is written on: one console, its width, its alphabet, and paragraphs with hanging indents."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from llamadiff.report.terminal import escape

MOST_COPIED = 1000  # characters of a line that is there to be copied
PROSE = 100  # cells; longer lines are hard to read

# What the renderer itself writes beyond ASCII, and one ASCII character for each.
_PLAIN = str.maketrans("✗·×▸•│─━╸→", "x.x>*|-=->")


class Page:
    """Where sections write their lines. Data goes through ``data`` or ``quoted``, never straight into a line."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.width = max(1, console.width)
        self.ascii_only = console.options.ascii_only
        self._is_blank = False  # the line before

    def data(self, value: object, limit: int = 200) -> str:
        return escape.shown(str(value), limit, ascii_only=self.ascii_only)

    def quoted(self, value: str, limit: int = 24) -> str:
        return escape.quoted(value, limit, ascii_only=self.ascii_only)

    def put(self, line: Text) -> None:
        """Print one line, as it is."""
        line = line.copy()
        line.rstrip()
        if self.ascii_only:
            line.plain = line.plain.translate(_PLAIN)
        self.console.print(line)
        self._is_blank = False

    def copied(self, text: str) -> None:
        """Print a line that is there to be copied: longer than the page, it is broken by the terminal alone."""
        self.console.print(Text(self.data(text, MOST_COPIED)), soft_wrap=True)
        self._is_blank = False

    def blank(self) -> None:
        """An empty line between sections; one, however many of them had nothing to say."""
        if not self._is_blank:
            self.console.print()
        self._is_blank = True

    def paragraph(self, label: Text, body: Text) -> None:
        """A label and text wrapped beside it, every line indented to the first one's start."""
        width = min(self.width, PROSE)
        beside = width - label.cell_len >= 24
        indent = label.cell_len if beside else min(2, width - 1)
        if not beside:
            self.put(label)
        for number, part in enumerate(body.wrap(self.console, width - indent)):
            self.put(Text.assemble(label if beside and number == 0 else " " * indent, part))

    def names(self, names: Iterable[str], most: int = 6) -> str:
        """The first few names, and how many more there are."""
        every = list(names)
        more = f" and {len(every) - most} more" if len(every) > most else ""
        return ", ".join(self.data(name) for name in every[:most]) + more
