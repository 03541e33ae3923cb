"""The command that holds llama.cpp's graph against a checkpoint's own code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llamadiff.cli.inputs import place_of, prompt_of, settings_files, token_ids
from llamadiff.cli.options import LlamaCpp, Model, NPredict, Prompt, PromptFile, Runner, Tokens, TokensFile
from llamadiff.cli.reports import PANEL, STANDARD_OUTPUT, put, target
from llamadiff.system.collisions import refuse_collisions


def port(
    model: Model,
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="The checkpoint of the file: a directory, or file.py:function, which builds a torch module.",
            metavar="CHECKPOINT",
        ),
    ],
    prompt: Prompt = None, prompt_file: PromptFile = None, tokens: Tokens = None, tokens_file: TokensFile = None,
    n_predict: NPredict = 0, llama_cpp: LlamaCpp = None, runner: Runner = None,
    json: Annotated[
        str | None,
        typer.Option("--json", callback=target, help="All of it as JSON (- for standard output).", metavar="FILE",
                     rich_help_panel=PANEL, show_default=False),
    ] = None,
) -> None:  # fmt: skip
    """Hold llama.cpp's graph of a file against the checkpoint's own code: the first ops that part, and why."""
    from llamadiff.engines.run_spec import How, Run
    from llamadiff.port.run import port as run_port
    from llamadiff.report.port import as_json, print_port
    from llamadiff.report.status_line import progress
    from llamadiff.report.terminal.report import make_console

    refuse_collisions(
        [("the model", model), ("the checkpoint", Path(checkpoint)), *settings_files(None, tokens_file, prompt_file)],
        [("--json", json)],
    )
    run = Run(
        prompt_of(prompt, prompt_file),
        token_ids(tokens, tokens_file),
        n_predict=n_predict,
        settings=place_of(llama_cpp, runner),
    )
    with progress() as shown:
        found = run_port(model, checkpoint, run, How(progress=shown))
    if json is not None:
        put(json, as_json(found))
    if json != STANDARD_OUTPUT:
        print_port(found, make_console())
    raise typer.Exit({"wrong": 1, "unchecked": 2}.get(found.verdict, 0))
