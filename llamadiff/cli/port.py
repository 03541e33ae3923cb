"""The command that holds llama.cpp's graph against a checkpoint's own code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llamadiff.cli.inputs import Asked
from llamadiff.cli.options import LlamaCpp, Model, NPredict, Prompt, Tokens, finish
from llamadiff.cli.reports import Reports
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
    prompt: Prompt = None, tokens: Tokens = None, n_predict: NPredict = 0, llama_cpp: LlamaCpp = None,
    *, reports: Reports,
) -> None:  # fmt: skip
    """Hold llama.cpp's graph of a file against the checkpoint's own code: the first ops that part, and why."""
    from llamadiff.engines.run_spec import How
    from llamadiff.port.run import port as run_port
    from llamadiff.report.port import print_port
    from llamadiff.report.status_line import progress
    from llamadiff.report.terminal.report import make_console

    asked = Asked(prompt, tokens, n_predict=n_predict, llama_cpp=llama_cpp)
    refuse_collisions([("the model", model), ("the checkpoint", Path(checkpoint)), *asked.files], reports.named)
    with progress() as shown:
        found = run_port(model, checkpoint, asked.run(), How(progress=shown))
    reports.write(found, lambda each: print_port(each, make_console()))
    finish(found.verdict)
