"""The command heads."""

from __future__ import annotations

from typing import Annotated

import typer

from llamadiff.cli import options as opt
from llamadiff.cli.command import START, Command
from llamadiff.cli.commands import how_of
from llamadiff.cli.inputs import RunOptions, prompt_or_trace
from llamadiff.cli.options import finish
from llamadiff.cli.reports import Reports, with_reports
from llamadiff.system.collisions import refuse_collisions

Candidate = Annotated[
    str | None,
    typer.Option(
        "--candidate", help="Your engine's head: a trace, a dump, or cmd: ...; without, llama.cpp's is checked.",
        rich_help_panel=opt.ENGINE, metavar="WHAT",
    ),
]  # fmt: skip


def heads(
    model: opt.Model, prompt: opt.PromptOrTrace = None, tokens: opt.Tokens = None, chat: opt.Chat = False,
    candidate: Candidate = None, name_map: opt.NameMap = None, timeout: opt.Timeout = 600.0,
    partial: opt.Partial = False, llama_cpp: opt.LlamaCpp = None, explain: opt.Explain = 0.0,
    tolerance: opt.Tolerance = None, fail_on: opt.FailOn = "wrong", *, reports: Reports,
) -> None:  # fmt: skip
    """Say which operation of an MTP head is wrong.

    The head that drafts (nextn): where it is wrong, the text stays right, and drafts are refused."""
    from llamadiff.ext.heads.compare import compare_heads
    from llamadiff.report.status_line import progress
    from llamadiff.verbs.verbs import compared_files

    prompt, candidate = prompt_or_trace(model, prompt, candidate)
    asked = RunOptions(prompt, tokens, chat, 0, llama_cpp, takes_candidate=True)
    read = [*compared_files(model, candidate, name_map), *asked.files, ("the tolerance file", tolerance)]
    refuse_collisions(read, reports.output_files)
    with progress() as shown:
        how = how_of(
            tolerance, reports, progress=shown, explain=explain, partial=partial, name_map=name_map, timeout=timeout
        )
        result = compare_heads(model, asked.run(), candidate, how)
    reports.write(result)
    finish(result.verdict, fail_on)


COMMANDS = (
    Command(
        START,
        with_reports(heads),
        (
            'llamadiff heads model.gguf "Once upon a time"         is llama.cpp\'s MTP head right?',
            "llamadiff heads model.gguf mine.safetensors           is my engine's?",
        ),
    ),
)
