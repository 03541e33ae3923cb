"""The formats that a report can be written in, each a file of this room and a row here. The command line reads them.

A format's functions are named, not imported: whoever asks for help waits for none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

TYPE_CHECKING = False
if TYPE_CHECKING:
    from llamadiff.comparison.result import Comparison


@dataclass(frozen=True)
class About:
    """What a report says of its own making: the command line, where there was one.

    ``refused``: traces that could not be checked, each with the reason.
    """

    command: tuple[str, ...] = ()
    refused: tuple[tuple[Path, str], ...] = ()


@dataclass(frozen=True)
class Format:
    """``name`` is that of the option: ``json`` of ``--json``. ``writer`` names a function, ``module:function``.

    It is given a Comparison and an About, and returns text. ``of_several`` is given pairs of a path and a Comparison,
    and an About: None where a format cannot tell of several traces that were checked. ``also`` names an environment
    variable: where it names a file, the text is put at that file's end too. ``pictures``: it shows what is kept only
    where it is asked for (``How.pictures``).
    """

    name: str
    help: str
    writer: str
    of_several: str | None = None
    also: str | None = None
    pictures: bool = False

    def text(self, comparison: Comparison, about: About) -> str:
        """One report."""
        written: str = _function(self.writer)(comparison, about)
        return written

    def text_of(self, results: Sequence[tuple[Path, Comparison]], about: About) -> str:
        """A report of several traces."""
        assert self.of_several is not None
        written: str = _function(self.of_several)(results, about)
        return written


FORMATS = (
    Format(
        "json", "The report as JSON, to a file, or - for standard output.",
        "json:to_json", of_several="json:checks_to_json",
    ),
    Format(
        "json-full", "The same with the error of every token.",
        "json:to_full_json", of_several="json:checks_to_full_json",
    ),
    Format("csv", "The table of taps as CSV, to a file or -.", "csv:to_csv"),
    Format(
        "junit", "The verdict as JUnit XML, to a file or -.", "junit:to_junit", of_several="junit:checks_to_junit",
    ),
    Format(
        "markdown", "A block for a GitHub issue, to a file or -; added to $GITHUB_STEP_SUMMARY too.",
        "markdown:to_markdown", of_several="markdown:checks_to_markdown", also="GITHUB_STEP_SUMMARY",
    ),
    Format(
        "html", "A page to look at: the map of taps, close-ups, curves, logits; to a file or -.",
        "html.page:to_html", of_several="html.page:checks_to_html", pictures=True,
    ),
)  # fmt: skip


def _function(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(import_module(f"llamadiff.report.{module}"), function)
    return found
