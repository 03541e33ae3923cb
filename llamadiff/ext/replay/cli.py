"""The command replay."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llamadiff.cli.command import LLAMA_CPP, Command
from llamadiff.cli.inputs import settings_of
from llamadiff.cli.options import LlamaCpp, finish
from llamadiff.cli.reports import Reports, with_files
from llamadiff.report.formats import Format
from llamadiff.system.collisions import refuse_collisions

FORMATS = (Format("markdown", (".md", ".markdown"), "ext.replay.report:to_markdown"),)


def replay(
    paths: Annotated[list[Path], typer.Argument(help="Ops that backend --keep saved.", metavar="OP...")],
    llama_cpp: LlamaCpp = None,
    *,
    reports: Reports,
) -> None:
    """Run saved ops again, on any build and device.

    Through ggml's own API; it says how far off they are."""
    from llamadiff.ext.replay.report import line_of
    from llamadiff.ext.replay.run import run_ops
    from llamadiff.result.comparison import verdict_of

    refuse_collisions([("the op", path) for path in paths], reports.output_files)
    found = run_ops(paths, settings_of(llama_cpp))
    reports.write(found, lambda runs: typer.echo("\n".join(map(line_of, runs))))
    finish(verdict_of(found))


COMMANDS = (
    Command(
        LLAMA_CPP,
        with_files(replay, FORMATS),
        ("llamadiff replay wrong-ops/*.safetensors --llama-cpp ../llama.cpp",),
    ),
)
