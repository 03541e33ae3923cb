"""The command that runs llama.cpp against itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llamadiff.cli.inputs import place_of, prompt_of, settings_files, token_ids
from llamadiff.cli.options import (
    JUDGEMENT,
    Chat,
    LlamaCpp,
    Model,
    NPredict,
    Prompt,
    PromptFile,
    Runner,
    Tokens,
    TokensFile,
)
from llamadiff.cli.reports import PANEL, STANDARD_OUTPUT, Reports, put, target
from llamadiff.system.collisions import refuse_collisions


def variants(
    model: Model, prompt: Prompt = None, prompt_file: PromptFile = None, tokens: Tokens = None,
    tokens_file: TokensFile = None, chat: Chat = False, n_predict: NPredict = 0, llama_cpp: LlamaCpp = None,
    runner: Runner = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", help="Only this one, such as kv=f16; more than once.", metavar="KEY=VALUE,..."),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1, help="How long one may take.", rich_help_panel=JUDGEMENT)
    ] = 600.0,
    json: Annotated[
        str | None,
        typer.Option("--json", callback=target, help="All of it as JSON (- for standard output).", metavar="FILE",
                     rich_help_panel=PANEL, show_default=False),
    ] = None,
    *, reports: Reports,
) -> None:  # fmt: skip
    """Run llama.cpp against itself: flash attention, caches, batches, threads, devices; one line for each."""
    from llamadiff.comparison.variants import run_variants
    from llamadiff.engines.run_spec import How, Run
    from llamadiff.report.status_line import progress
    from llamadiff.report.terminal.report import make_console
    from llamadiff.report.variants import as_json, print_variants

    text = prompt_of(prompt, prompt_file)
    refuse_collisions(
        [("the model", model), *settings_files(None, tokens_file, prompt_file)], [("--json", json), *reports.named]
    )
    with progress() as shown:
        run = Run(text, token_ids(tokens, tokens_file), chat, n_predict, settings=place_of(llama_cpp, runner))
        found = run_variants(model, run, How(progress=shown, pictures=reports.pictures), only or (), timeout)
    if json is not None:
        put(json, as_json(found))
    judged = [(Path(row.name), row.comparison) for row in found.rows if row.comparison is not None]
    reports.write_several(judged, [(Path(row.name), row.failed) for row in found.rows if row.failed])
    if json != STANDARD_OUTPUT and not reports.takes_standard_output:
        print_variants(found, make_console())
    raise typer.Exit({"wrong": 1, "unchecked": 2}.get(found.verdict, 0))
