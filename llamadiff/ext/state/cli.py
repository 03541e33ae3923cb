"""The command variants."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llamadiff.cli.command import LLAMA_CPP, Command
from llamadiff.cli.inputs import RunOptions
from llamadiff.cli.options import JUDGEMENT, Chat, LlamaCpp, Model, NPredict, Prompt, Tokens, finish
from llamadiff.cli.reports import Reports, with_files
from llamadiff.report.formats import Format, of_several
from llamadiff.system.collisions import refuse_collisions


def _formats() -> tuple[Format, ...]:
    own = Format("json", (".json",), "ext.state.report:as_json", plain=True)
    return (own, *(form for form in of_several() if not form.name.startswith("json")))


def variants(
    model: Model, prompt: Prompt = None, tokens: Tokens = None, chat: Chat = False, n_predict: NPredict = 0,
    llama_cpp: LlamaCpp = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", help="Only this one, such as kv=f16; more than once.", metavar="KEY=VALUE,..."),
    ] = None,
    schedule: Annotated[
        int, typer.Option("--schedule", min=0, help="A random schedule of so many steps, such as a server has.")
    ] = 0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Which random schedule.")] = 0,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1, help="How long one may take.", rich_help_panel=JUDGEMENT)
    ] = 600.0,
    *, reports: Reports,
) -> None:  # fmt: skip
    """Run llama.cpp against itself: caches, batches, devices.

    Flash attention and threads too; one line for each."""
    from llamadiff.engines.run_spec import How
    from llamadiff.ext.state.report import print_variants
    from llamadiff.ext.state.variants import run_variants
    from llamadiff.report.status_line import progress
    from llamadiff.report.terminal.report import make_console

    asked = RunOptions(prompt, tokens, chat, n_predict, llama_cpp)
    refuse_collisions([("the model", model), *asked.files], reports.output_files)
    with progress() as shown:
        how = How(progress=shown, pictures=reports.pictures)
        random = (f"schedule={schedule},seed={seed}",) if schedule else ()
        found = run_variants(model, asked.run(), how, (*(only or ()), *random), timeout)
    judged = [(Path(row.name), row.comparison) for row in found.rows if row.comparison is not None]
    reports.write_several(judged, [(Path(row.name), row.failed) for row in found.rows if row.failed])
    reports.write_own(found)
    if not reports.takes_standard_output:
        words = [str(model), *([] if prompt is None else [prompt]), *(["--chat"] if chat else [])]
        words += [*(["--tokens", tokens] if tokens else []), *(["--n-predict", str(n_predict)] if n_predict else [])]
        words += [word for setting in llama_cpp or () for word in ("--llama-cpp", setting)]
        print_variants(found, make_console(), words)
    finish(found.verdict)


COMMANDS = (
    Command(
        LLAMA_CPP,
        with_files(variants, _formats()),
        (
            'llamadiff variants model.gguf "Once upon a time"',
            'llamadiff variants model.gguf "Once" --only kv=q8_0,flash_attn=on --only dir=../llama.cpp',
        ),
    ),
)
