"""The commands tokens and template."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llamadiff.cli.command import MODEL, Command
from llamadiff.cli.inputs import settings_of
from llamadiff.cli.options import JUDGEMENT, LlamaCpp, Model, finish
from llamadiff.cli.reports import Reports, with_files
from llamadiff.report.formats import Format
from llamadiff.system.collisions import refuse_collisions

OF_TEMPLATES = (Format("json", (".json",), "ext.prompt.templates.page:as_json", plain=True),)
OF_TOKENS = (Format("json", (".json",), "ext.prompt.tokens.page:as_json", plain=True),)


def tokens(
    model: Model,
    candidate: Annotated[
        str | None,
        typer.Option(
            "--candidate",
            help="Your tokenizer: a command that reads a JSON string a line and writes a JSON list of ids a line; a "
            "llama-server's URL, a tokenizer.json, another .gguf, file.py:function. Without, llama.cpp is checked.",
            metavar="WHAT", show_default=False,
        ),
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option("--texts", help="Texts of your own, one a line; JSON strings in a .jsonl.", metavar="FILE",
                     show_default=False, exists=True, dir_okay=False),
    ] = None,
    back: Annotated[
        bool,
        typer.Option("--back", help="The other direction: the command reads a JSON list of ids a line and writes the "
                     "text as a JSON string, or a list of its parts."),
    ] = False,
    count: Annotated[int, typer.Option("--count", help="How many texts are made.", min=1, max=10_000_000)] = 20_000,
    seed: Annotated[int, typer.Option(help="Of the texts that are made.", min=0, max=1 << 31)] = 1,
    timeout: Annotated[
        float, typer.Option("--timeout", help="Seconds that one answer may take.", min=0.1, rich_help_panel=JUDGEMENT)
    ] = 60.0,
    llama_cpp: LlamaCpp = None,
    *, reports: Reports,
) -> None:  # fmt: skip
    """Compare a tokenizer with llama.cpp's and an independent one.

    The smallest text on which they part, and why."""
    from llamadiff.ext.prompt.tokens.back import back as run_back
    from llamadiff.ext.prompt.tokens.page import print_back, print_tokens
    from llamadiff.ext.prompt.tokens.run import Wanted
    from llamadiff.ext.prompt.tokens.run import tokens as run_tokens
    from llamadiff.report.status_line import progress
    from llamadiff.report.terminal.report import make_console
    from llamadiff.system.errors import UserError

    refuse_collisions([("the model", model), ("the texts", texts)], reports.output_files)
    settings = settings_of(llama_cpp)
    if back:
        if candidate is None:
            raise UserError("--back needs --candidate: a command that reads ids and writes texts")
        with progress() as shown:
            made = run_back(model, candidate, settings, shown, count, seed, timeout)
        reports.write(made, lambda each: print_back(each, make_console()))
        finish(made.verdict)
    with progress() as shown:
        found = run_tokens(model, candidate, settings, shown, Wanted(count, texts, seed), timeout)
    reports.write(found, lambda each: print_tokens(each, make_console()))
    finish(found.verdict)


def template(
    model: Annotated[Path, typer.Argument(help="A .gguf, or a .jinja file.", metavar="MODEL", show_default=False)],
    candidate: Annotated[
        str,
        typer.Option(
            "--candidate",
            help="Your renderer: a command that reads a conversation as JSON a line, {messages, tools, "
            "add_generation_prompt, chat_template_kwargs}, and writes the prompt as a JSON string a line; a "
            "llama-server's URL (its key in LLAMADIFF_API_KEY); another .gguf, a .jinja file, file.py:function.",
            metavar="WHAT", show_default=False,
        ),
    ],
    timeout: Annotated[
        float, typer.Option("--timeout", help="Seconds that one answer may take.", min=0.1, rich_help_panel=JUDGEMENT)
    ] = 60.0,
    *, reports: Reports,
) -> None:  # fmt: skip
    """Compare a prompt renderer with the model's chat template.

    The smallest conversation on which they part, and why."""
    from llamadiff.ext.prompt.templates.page import print_templates
    from llamadiff.ext.prompt.templates.run import template as run_template
    from llamadiff.report.status_line import progress
    from llamadiff.report.terminal.report import make_console

    refuse_collisions([("the model", model), ("the candidate", Path(candidate))], reports.output_files)
    with progress() as shown:
        found = run_template(model, candidate, timeout, shown)
    reports.write(found, lambda each: print_templates(each, make_console()))
    finish(found.verdict)


COMMANDS = (
    Command(
        MODEL,
        with_files(tokens, OF_TOKENS),
        (
            "llamadiff tokens model.gguf                                      is llama.cpp's tokenizer right?",
            'llamadiff tokens model.gguf --candidate "./engine --tokenize"    is mine?',
            "llamadiff tokens model.gguf --candidate tokenizer.json",
        ),
    ),
    Command(
        MODEL,
        with_files(template, OF_TEMPLATES),
        (
            'llamadiff template model.gguf --candidate "./engine --render"',
            "llamadiff template model.gguf --candidate engine.py:render -o report.json",
            "llamadiff template model.gguf --candidate chat_template.jinja    are two templates the same?",
        ),
    ),
)
