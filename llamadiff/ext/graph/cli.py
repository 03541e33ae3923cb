"""The commands backend and graph."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llamadiff.cli.command import LLAMA_CPP, Command
from llamadiff.cli.commands import how_of
from llamadiff.cli.inputs import RunOptions, settings_of
from llamadiff.cli.options import Chat, FailOn, LlamaCpp, Model, NPredict, Prompt, Recorded, Tokens, Tolerance, finish
from llamadiff.cli.reports import Reports, with_reports
from llamadiff.system.collisions import kept_files, refuse_collisions
from llamadiff.system.errors import UserError


def backend(
    model: Model, prompt: Prompt = None, tokens: Tokens = None, chat: Chat = False, n_predict: NPredict = 0,
    llama_cpp: LlamaCpp = None,
    keep: Annotated[Path | None, typer.Option("--keep", help="Save each wrong op, with its inputs, here.")] = None,
    node: Annotated[
        list[str] | None,
        typer.Option("--node", help="With --keep: save these too, by name or op: Qcur-0, RMS_NORM.", metavar="NODE"),
    ] = None,
    recorded: Recorded = None, tolerance: Tolerance = None, fail_on: FailOn = "wrong", *, reports: Reports,
) -> None:  # fmt: skip
    """Check every node of llama.cpp's graph on its real inputs.

    For authors of backends and of ports."""
    from llamadiff.ext.graph.backend import judge_graph
    from llamadiff.report.status_line import progress

    asked = RunOptions(prompt, tokens, chat, n_predict, llama_cpp)
    read = [("the model", model), ("the recorded run", recorded), ("the tolerance file", tolerance), *asked.files]
    refuse_collisions(read, [*kept_files(keep), *reports.output_files])
    if recorded is not None and (prompt is not None or tokens or n_predict):
        raise UserError(f"--recorded {recorded}: says what was run; give no prompt, tokens or --n-predict with it")
    run = asked.run()
    if node and keep is None:
        raise UserError(f"--node {node[0]}: says what else is saved; give --keep DIR with it")
    with progress() as shown:
        result = judge_graph(model, run, how_of(tolerance, reports, progress=shown), keep, recorded, node or ())
    reports.write(result)
    finish(result.verdict, fail_on)


def graph(
    model: Model,
    tokens: Annotated[int, typer.Option("--n-tokens", min=1, max=256, help="Shapes for a prompt of this many.")] = 2,
    layer: Annotated[int | None, typer.Option("--layer", min=0, help="Only this layer.")] = None,
    dot: Annotated[bool, typer.Option("--dot", help="Graphviz instead of a tree.", metavar="")] = False,
    llama_cpp: LlamaCpp = None,
) -> None:
    """Print llama.cpp's graph of a model.

    A tree for each layer, with shapes, types and the names of taps."""
    from llamadiff.ext.graph import listing
    from llamadiff.ext.graph.backend import list_nodes

    nodes = listing.of_layer(list_nodes(model, tokens, settings_of(llama_cpp)), layer)
    typer.echo(listing.as_dot(nodes), nl=False) if dot else listing.print_tree(nodes)


COMMANDS = (
    Command(
        LLAMA_CPP,
        with_reports(backend),
        ('llamadiff backend model.gguf "Once" --n-predict 4 --llama-cpp flash_attn=on --keep wrong-ops',),
    ),
    Command(
        LLAMA_CPP,
        graph,
        ("llamadiff graph model.gguf --layer 0",),
    ),
)
