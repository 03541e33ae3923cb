"""Where reports go: ``-o FILE`` in the format that the name ends in, or ``-o NAME:FILE``; and what writes them."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import basename
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llamadiff.report.formats import About, Format, formats, of_several
from llamadiff.system.collisions import STANDARD_OUTPUT, Named
from llamadiff.system.errors import UserError
from llamadiff.system.output import add_text, check_text_target, encode, make_room, write_text

if TYPE_CHECKING:
    from llamadiff.result.comparison import Comparison

PANEL = "Report"
MOST_GATHERED = 1 << 20  # bytes that GitHub shows of one step's summary


@dataclass(frozen=True)
class Reports:
    """What was asked for: files (or - for standard output) with their formats, and how much the terminal shows.

    ``folder``: where traces are kept.
    """

    targets: Sequence[tuple[Format, str]] = ()
    folder: Path | None = None
    full: bool = False

    @classmethod
    def of(cls, texts: Sequence[str], formats: Sequence[Format], keeps: bool = False, full: bool = False) -> Reports:
        """From the values of ``-o``; ``keeps``: a directory takes traces. Raises UserError where none can be written.

        That is asked before any work is done.
        """
        folders = [text for text in texts if keeps and _is_folder(text)]
        targets = [_target(text, formats) for text in texts if text not in folders]
        for _, file in targets:
            if file != STANDARD_OUTPUT:
                make_room(Path(file), force=True)
                check_text_target(Path(file))
        return cls(targets, Path(folders[-1]) if folders else None, full)

    @property
    def output_files(self) -> list[Named]:
        """The files that will be written, by their option."""
        return [("-o", target) for _, target in self.targets]

    @property
    def takes_standard_output(self) -> bool:
        """Whether standard output is a file's, so that nothing else may be printed."""
        return any(target == STANDARD_OUTPUT for _, target in self.targets)

    @property
    def pictures(self) -> bool:
        """Whether a format that shows pictures was asked for."""
        return any(form.pictures for form, _ in self.targets)

    def get_ready(self) -> None:
        """Import what prints, before there is anything to print."""
        if not self.takes_standard_output:
            import llamadiff.report.terminal.report  # noqa: F401

    def write(self, result: Any, show: Callable[[Any], None] | None = None) -> None:
        """Write each report, and ``show`` one on the terminal unless standard output is taken."""
        for form, target in self.targets:
            _write_report(form, target, form.text(result, _about()))
        if not self.takes_standard_output:
            (show or self._render)(result)

    def write_own(self, result: Any) -> None:
        """Write it in the formats that cannot tell of several traces, where the others did."""
        for form, target in self.targets:
            if form.of_several is None:
                _write_report(form, target, form.text(result, _about()))

    def _render(self, result: Comparison) -> None:
        from llamadiff.report.terminal.report import make_console, render

        render(result, make_console(), self.full)

    def write_several(
        self, results: Sequence[tuple[Path, Comparison]], refused: Sequence[tuple[Path, str]] = ()
    ) -> None:
        """Write a report of several traces in each format; those that were ``refused`` have a reason instead."""
        about = replace(_about(), refused=tuple(refused))
        for form, target in self.targets:
            if form.of_several is not None:
                _write_report(form, target, form.text_of(results, about))


def _is_folder(text: str) -> bool:
    """Whether a value of ``-o`` names a directory: one that is there, or one by the separator at its end."""
    return bool(text) and (not basename(text) or Path(text).is_dir())


def _target(text: str, formats: Sequence[Format]) -> tuple[Format, str]:
    """A value of ``-o``: ``report.json``, ``json:FILE``, ``json:-``."""
    name, _, rest = text.partition(":")
    words = name.lower(), f".{name.lower()}"
    named = next((form for form in formats if rest and (form.name == words[0] or words[1] in form.endings)), None)
    if named is not None:
        return named, rest
    for form in formats:
        if text.lower().endswith(form.endings) and not (rest and len(name) > 1 and name.isidentifier()):
            return form, text
    endings = ", ".join(ending for form in formats for ending in form.endings[:1])
    names = " or ".join(f"{form.name}:FILE" for form in formats)
    raise UserError(f"-o {text[:80]}: expected a name that ends in {endings}; or {names}, where - is standard output")


def _write_report(form: Format, target: str, text: str) -> None:
    """Write a report where it was asked for; and at the end of the file that gathers such reports, if there is one.

    That the latter has no room is said, and is no failure.
    """
    gathering = os.environ.get(form.also) if form.also else None
    if not gathering or not _is_same(target, gathering):
        write_output(target, text)
    if gathering:
        try:
            add_text(Path(gathering), text, MOST_GATHERED)
        except UserError as error:
            typer.echo(f"llamadiff: {form.also}: {error}", err=True)


def _is_same(target: str, path: str) -> bool:
    return target != STANDARD_OUTPUT and os.path.realpath(target) == os.path.realpath(path)


def write_output(target: str, text: str) -> None:
    """Write text to a file, or to standard output for -."""
    if target == STANDARD_OUTPUT:
        sys.stdout.flush()
        sys.stdout.buffer.write(encode(text))
    else:
        write_text(Path(target), text)


def _about() -> About:
    return About(("llamadiff", *sys.argv[1:]))


Full = Annotated[
    bool,
    typer.Option(
        "--full", help="Every layer, token and cause, and how all was computed.", rich_help_panel=PANEL, metavar=""
    ),
]


def with_reports(command: Callable[..., None], keeps: bool = False) -> Callable[..., None]:
    """A command that is given its ``reports``: it gets -o and --full; ``keeps``: -o DIR/ keeps the traces."""
    return _with_options(command, formats(), keeps, {"full": (Full, False)})


def with_files(command: Callable[..., None], own: Sequence[Format] | None = None) -> Callable[..., None]:
    """The same for a command whose report on the terminal has one length."""
    return _with_options(command, own or formats(), False, {})


def with_reports_of_several(command: Callable[..., None]) -> Callable[..., None]:
    """The same for a command that tells of several traces, in a line for each."""
    return with_files(command, of_several())


def _with_options(
    command: Callable[..., None], formats: Sequence[Format], keeps: bool, shown: Mapping[str, tuple[Any, Any]]
) -> Callable[..., None]:
    """The command with options in place of ``reports``."""

    def gathered(output: Sequence[str] | None, **given: Any) -> None:
        more = {key: given.pop(key) for key in shown}
        command(**given, reports=Reports.of(output or (), formats, keeps, **more))

    own = inspect.signature(command, eval_str=True).parameters
    parameters = [each for name, each in own.items() if name != "reports"]
    added = {"output": (_output(formats, keeps), None), **shown}
    parameters += [
        inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for key, (annotation, default) in added.items()
    ]
    gathered.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    gathered.__annotations__ = {each.name: each.annotation for each in parameters}
    gathered.__name__, gathered.__doc__ = command.__name__, command.__doc__
    return gathered


def _output(formats: Sequence[Format], keeps: bool) -> Any:
    endings = ", ".join(ending for form in formats for ending in form.endings[:1])
    kept = "; DIR/ keeps the traces" if keeps else ""
    words = f"A report, by its ending: {endings}; or {formats[0].name}:FILE, - for standard output{kept}. Repeatable."
    return Annotated[
        list[str] | None,
        typer.Option("-o", "--output", help=words, metavar="FILE", rich_help_panel=PANEL, show_default=False),
    ]
