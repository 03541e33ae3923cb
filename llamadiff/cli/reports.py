"""Where a command's report goes: the options of every format that report/ has, and what writes them."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llamadiff.report.formats import FORMATS, About, Format
from llamadiff.system.collisions import Named
from llamadiff.system.errors import UserError
from llamadiff.system.output import add_text, check_text_target, encoded, write_text

if TYPE_CHECKING:
    from llamadiff.comparison.result import Comparison

PANEL = "Report"
STANDARD_OUTPUT = "-"
MOST_GATHERED = 1 << 20  # bytes that GitHub shows of one step's summary


@dataclass(frozen=True)
class Reports:
    """What was asked for: a file (or - for standard output) for each format, and how much the terminal shows."""

    targets: Mapping[str, str] = field(default_factory=dict)
    full: bool = False
    verbose: bool = False

    @property
    def named(self) -> list[Named]:
        """The files that will be written, by their options."""
        return [(f"--{name}", target) for name, target in self.targets.items()]

    @property
    def takes_standard_output(self) -> bool:
        """Whether standard output is a file's, so that nothing else may be printed."""
        return STANDARD_OUTPUT in self.targets.values()

    @property
    def pictures(self) -> bool:
        """Whether a format that shows pictures was asked for."""
        return any(form.pictures for form in self._formats())

    def get_ready(self) -> None:
        """Import what prints, before there is anything to print."""
        if not self.takes_standard_output:
            import llamadiff.report.terminal.report  # noqa: F401

    def write(self, result: Comparison, causes: bool = False) -> None:
        """Write each report, and print one unless standard output is taken; ``causes``: these alone."""
        for form in self._formats():
            self._put(form, form.text(result, _about()))
        if not self.takes_standard_output:
            from llamadiff.report.terminal.report import make_console, render, render_causes

            if causes:
                render_causes(result, make_console())
            else:
                render(result, make_console(), self.full, self.verbose)

    def write_several(
        self, results: Sequence[tuple[Path, Comparison]], refused: Sequence[tuple[Path, str]] = ()
    ) -> None:
        """Write a report of several traces in each format; those that were ``refused`` have a reason instead."""
        about = replace(_about(), refused=tuple(refused))
        for form in self._formats():
            self._put(form, form.text_of(results, about))

    def _put(self, form: Format, text: str) -> None:
        """Write a report where it was asked for; and at the end of the file that gathers such reports, if there is one.

        That the latter has no room is said, and is no failure.
        """
        target, gathering = self.targets[form.name], os.environ.get(form.also) if form.also else None
        if not gathering or not _is_same(target, gathering):
            put(target, text)
        if gathering:
            try:
                add_text(Path(gathering), text, MOST_GATHERED)
            except UserError as error:
                typer.echo(f"llamadiff: {form.also}: {error}", err=True)

    def _formats(self) -> list[Format]:
        return [form for form in FORMATS if form.name in self.targets]


def _is_same(target: str, path: str) -> bool:
    return target != STANDARD_OUTPUT and os.path.realpath(target) == os.path.realpath(path)


def put(target: str, text: str) -> None:
    """Write text to a file, or to standard output for -."""
    if target == STANDARD_OUTPUT:
        sys.stdout.flush()
        sys.stdout.buffer.write(encoded(text))
    else:
        write_text(Path(target), text)


def _about() -> About:
    return About(("llamadiff", *sys.argv[1:]))


Full = Annotated[bool, typer.Option("--full", help="Every layer, token and cause.", rich_help_panel=PANEL, metavar="")]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose", help="How weights were decoded and multiplied, and the time.", rich_help_panel=PANEL, metavar=""
    ),
]


def with_reports(command: Callable[..., None]) -> Callable[..., None]:
    """A command that is given its ``reports``: it gets an option for each format, --full and --verbose."""
    return _with_options(command, FORMATS, {"full": Full, "verbose": Verbose})


def with_files(command: Callable[..., None]) -> Callable[..., None]:
    """The same for a command whose report on the terminal has one length."""
    return _with_options(command, FORMATS, {})


def with_reports_of_several(command: Callable[..., None]) -> Callable[..., None]:
    """The same for a command that tells of several traces, in a line for each."""
    return _with_options(command, [form for form in FORMATS if form.of_several], {})


def with_reports_beside_json(command: Callable[..., None]) -> Callable[..., None]:
    """The same for a command that has a JSON of its own."""
    return _with_options(
        command, [form for form in FORMATS if form.of_several and not form.name.startswith("json")], {}
    )


def _with_options(
    command: Callable[..., None], formats: Sequence[Format], shown: dict[str, Any]
) -> Callable[..., None]:
    """The command with options in place of ``reports``."""
    options = {form.name.replace("-", "_"): form for form in formats}

    def gathered(**given: Any) -> None:
        targets = {form.name: target for key, form in options.items() if (target := given.pop(key)) is not None}
        reports = Reports(targets, **{key: given.pop(key) for key in shown})
        command(**given, reports=reports)

    own = inspect.signature(command, eval_str=True).parameters
    parameters = [each for name, each in own.items() if name != "reports"]
    parameters += [_parameter(key, _option_of(form), None) for key, form in options.items()]
    parameters += [_parameter(key, annotation, False) for key, annotation in shown.items()]
    gathered.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    gathered.__annotations__ = {each.name: each.annotation for each in parameters}
    gathered.__name__, gathered.__doc__ = command.__name__, command.__doc__
    return gathered


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _option_of(form: Format) -> Any:
    option = typer.Option(
        f"--{form.name}", callback=target, help=form.help, metavar="FILE", rich_help_panel=PANEL, show_default=False
    )
    return Annotated[str | None, option]


def target(value: str | None) -> str | None:
    """Checks that a report can be written there, before any work."""
    if value is not None and value != STANDARD_OUTPUT:
        check_text_target(Path(value))
    return value
