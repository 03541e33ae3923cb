"""The command line: the core's commands, and those of slices."""

from __future__ import annotations

from typing import Annotated

import typer

from llamadiff import plugins
from llamadiff.cli.command import PANELS
from llamadiff.cli.commands import COMMANDS


def _epilog() -> str:
    """What stands under all commands: exit codes, and slices that cannot be imported."""
    codes = "Exit codes: 0 right, 1 wrong, 2 could not tell; 70 a fault of llamadiff's own."
    missing = plugins.missing_slices()
    return "\n\n".join((codes, *(f"Missing: {each.name} ({each.reason})" for each in missing)))


app = typer.Typer(
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="Says which operation of an LLM inference engine is wrong, since which layer, and why: "
    "llama.cpp and an independent NumPy engine run the same tokens, and every tap is compared.",
    epilog=_epilog(),
)


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


_commands = [
    *COMMANDS,
    *(command for commands in plugins.ask_all(lambda each: each.commands()) for command in commands),
]
for _command in sorted(_commands, key=lambda command: PANELS.index(command.panel)):
    _examples = "\n\n".join(("Examples:", *_command.examples)) if _command.examples else None
    app.command(rich_help_panel=_command.panel, epilog=_examples)(_command.function)
