"""The formats that a report can be written in, each a file of this room and a row here. The command line reads them.

A format's functions are named, not imported: whoever asks for help waits for none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from llamadiff import plugins
from llamadiff.system.commands import quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from llamadiff.result.comparison import Comparison

MOST = 2000  # characters; a longer command line (of token ids) is not shown


@dataclass(frozen=True)
class About:
    """What a report says of its own making: the command line, where there was one.

    ``refused``: traces that could not be checked, each with the reason.
    """

    command: tuple[str, ...] = ()
    refused: tuple[tuple[Path, str], ...] = ()


@dataclass(frozen=True)
class Format:
    """``name`` is its word in ``-o json:FILE``, and ``endings`` those of files that are written in it.

    ``writer`` names a function, ``module:function``, which is given a result and an About, and returns text.
    ``of_several`` is given pairs of a path and a Comparison, and an About: None where a format cannot tell of several
    traces that were checked. ``also`` names an environment variable: where it names a file, the text is put at that
    file's end too. ``pictures``: it shows what is kept only where it is asked for (``How.pictures``). ``plain``: its
    writer is given the result alone.
    """

    name: str
    endings: tuple[str, ...]
    writer: str
    of_several: str | None = None
    also: str | None = None
    pictures: bool = False
    plain: bool = False

    def text(self, result: Any, about: About) -> str:
        """One report."""
        written: str = resolve_name(f"llamadiff.{self.writer}")(result, *(() if self.plain else (about,)))
        return written

    def text_of(self, results: Sequence[tuple[Path, Comparison]], about: About) -> str:
        """A report of several traces."""
        assert self.of_several is not None
        written: str = resolve_name(f"llamadiff.{self.of_several}")(results, about)
        return written


CSV = Format("csv", (".csv",), "report.json:to_csv")
FORMATS = (
    Format("json", (".json",), "report.json:to_json", of_several="report.json:checks_to_json"),
    Format("json-full", (), "report.json:to_full_json", of_several="report.json:checks_to_full_json"),  # every token's
    CSV,
)  # fmt: skip


def formats() -> tuple[Format, ...]:
    """The core's, and those of slices."""
    return (*FORMATS, *(form for forms in plugins.ask_all(lambda each: each.formats()) for form in forms))


def of_several() -> tuple[Format, ...]:
    """Those that can tell of several traces that were checked."""
    return tuple(form for form in formats() if form.of_several is not None)


def command_line(command: Sequence[str]) -> str | None:
    """The words of a command on one line; None where there was no command, or it would be too long to show."""
    line = " ".join(quote(word) for word in command)
    return line if 0 < len(line) <= MOST else None
