"""The command record."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from llamadiff.cli import options as opt
from llamadiff.cli.command import START, Command
from llamadiff.cli.commands import run_compare
from llamadiff.cli.inputs import RunOptions
from llamadiff.cli.reports import Reports, with_files
from llamadiff.system.errors import UserError

EXAMPLE = "llamadiff record model.gguf 'Once upon a time' -- ./engine -m model.bin -i 'Once upon a time'"


def record(
    model: opt.Model,
    words: Annotated[
        list[str],
        typer.Argument(
            help="The prompt that the program is given (none with --tokens); after --, the program and its own words.",
            metavar="[PROMPT] -- PROGRAM ARGS...",
        ),
    ],
    tokens: opt.Tokens = None, chat: opt.Chat = False, timeout: opt.Timeout = 600.0, llama_cpp: opt.LlamaCpp = None,
    explain: opt.Explain = 0.0, fail_on: opt.FailOn = "wrong", force: opt.Force = False, *, reports: Reports,
) -> None:  # fmt: skip
    """Find an unchanged engine's values in its memory."""
    prompt, program = (None, words) if tokens is not None else (words[0], words[1:])
    if not program:
        raise UserError(f"record: no program behind the prompt; {EXAMPLE}")
    asked = RunOptions(prompt, tokens, chat, 0, llama_cpp, None, takes_candidate=True)
    more = {"explain": explain, "timeout": timeout}
    run_compare(model, asked, f"record:{shlex.join(program)}", None, fail_on, reports, more, (), force)


COMMANDS = (Command(START, with_files(record), (EXAMPLE,)),)
