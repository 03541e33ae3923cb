"""The command line: the core's commands, and those of slices."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import chain
from typing import Annotated, Any

import typer

from llamadiff import plugins
from llamadiff.cli.command import PANELS
from llamadiff.cli.commands import COMMANDS
from llamadiff.system.errors import UserError

ABOUT = """llamadiff says which operation of an LLM inference engine is wrong, and why.
    llamadiff compare model.gguf "Once upon a time"     is llama.cpp right here?
    llamadiff compare model.gguf mine.safetensors       is my engine?
"""
END = """
llamadiff COMMAND -h: its options, with examples. Others: --version, --help,
--install-completion. Exit codes: 0 right, 1 wrong, 2 could not tell.
"""


class OneCommand(typer.core.TyperCommand):
    """A command, of whose values slices may say what is wrong with them before it runs."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given, _, _ = self.make_parser(ctx).parse_args([*args])
        if said := plugins.ask_first(lambda each: each.misuse(self, given)):
            raise UserError(said)
        return super().parse_args(ctx, args)


class Page(typer.core.TyperGroup):
    """The command line's help: a page for 80 columns and 40 lines, a line a command."""

    def main(self, *given: Any, **more: Any) -> Any:
        try:
            return super().main(*given, **more)
        except Exception as error:
            refused, words = error, [*(given[0] if given else more.get("args") or sys.argv[1:])]
            if not hasattr(error, "format_message"):
                raise
            said = plugins.ask_first(lambda each: each.usage(refused, self.commands, words))
            raise (error if said is None else UserError(said)) from None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        every: Iterable[tuple[str, Any]] = self.commands.items()
        formatter.width = 80
        formatter.write(ABOUT)
        for panel in PANELS:
            with formatter.section(typer.style(panel, bold=True)):
                formatter.write_dl([(n, c.get_short_help_str(80)) for n, c in every if c.rich_help_panel == panel])
        formatter.write(END)
        formatter.write("".join(f"Missing: {each.name} ({each.reason})\n" for each in plugins.missing_slices()))


app = typer.Typer(cls=Page, context_settings={"help_option_names": ["-h", "--help"]}, pretty_exceptions_enable=False)


def _version(asked: bool) -> None:
    if asked:
        from llamadiff import __version__

        typer.echo(f"llamadiff {__version__}")
        raise typer.Exit


@app.callback()
def llamadiff(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.", metavar="")
    ] = False,
) -> None:
    """Options that need no command."""


_commands = [*COMMANDS, *chain.from_iterable(plugins.ask_all(lambda each: each.commands()))]
for _each in sorted(_commands, key=lambda command: PANELS.index(command.panel)):
    _examples = "\n\n".join(("Examples:", *_each.examples)) if _each.examples else None
    _how = {"allow_interspersed_args": not _each.takes_program}
    app.command(cls=OneCommand, rich_help_panel=_each.panel, epilog=_examples, context_settings=_how)(_each.function)
