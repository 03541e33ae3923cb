"""The command watch."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from llamadiff.cli.command import LLAMA_CPP, Command
from llamadiff.cli.inputs import bytes_of, settings_of
from llamadiff.cli.options import finish
from llamadiff.cli.reports import Reports, with_files
from llamadiff.report.formats import CSV, Format, of_several
from llamadiff.system.collisions import kept_files, refuse_collisions
from llamadiff.system.errors import UserError

_RANGE = re.compile(r"(\d{1,12})(?:-(\d{1,12}))?", re.ASCII)


def _formats() -> tuple[Format, ...]:
    return (*of_several(), replace(CSV, of_several="report.json:checks_to_csv"))


def watch(
    program: Annotated[
        list[str], typer.Argument(help="The program and its own words, after --.", metavar="-- PROGRAM ARGS...")
    ],
    graphs: Annotated[
        str | None, typer.Option("--graphs", help="Only these graphs, all of them.", metavar="A-B", show_default=False)
    ] = None,
    first: Annotated[int, typer.Option("--first", help="The first so many graphs.", min=0)] = 4,
    every: Annotated[
        int,
        typer.Option("--every", help="Then each graph that is like none before, and one in so many; 1: all.", min=0),
    ] = 10,
    nodes: Annotated[
        str, typer.Option("--nodes", help="Only nodes of such names: 'ffn*'.", metavar="PATTERN", show_default=False)
    ] = "",
    keep: Annotated[Path | None, typer.Option("--keep", help="Save each wrong op, with its inputs, here.")] = None,
    max_waiting: Annotated[
        str, typer.Option("--max-waiting", help="On disk, of graphs that wait to be judged.", metavar="BYTES")
    ] = "2G",
    max_weights: Annotated[
        str, typer.Option("--max-weights", help="On disk, of weights.", metavar="BYTES")
    ] = "16G",
    max_node: Annotated[
        str,
        typer.Option(
            "--max-node", help="What a node reads and gives; of larger ones some rows are judged.", metavar="BYTES"
        ),
    ] = "1G",
    llama_cpp: Annotated[
        list[str] | None,
        typer.Option("--llama-cpp", help="The Python that runs the program, in a container or by ssh.",
                     metavar="runner=CMD", show_default=False),
    ] = None,
    *, reports: Reports,
) -> None:  # fmt: skip
    """Run a program that uses ggml, and check every node.

    Vision, speech, images, a server at work."""
    from llamadiff.engines.run_spec import How
    from llamadiff.ext.watch.report import print_watched
    from llamadiff.ext.watch.watch import watch_program
    from llamadiff.ext.watch.watch_run import Bounds
    from llamadiff.report.terminal.report import make_console

    refuse_collisions([], [*kept_files(keep), *reports.output_files])
    sizes = bytes_of(max_waiting, "--max-waiting"), bytes_of(max_weights, "--max-weights")
    bounds = Bounds(_range_of(graphs), first, every, nodes, *sizes, bytes_of(max_node, "--max-node"))
    found = watch_program(
        program, bounds, How(pictures=reports.pictures), keep, settings_of(llama_cpp, environment=False)
    )
    reports.write_several(found.graphs)
    print_watched(found.graphs, found.said, found.ended, make_console(sys.stderr))
    finish(found.verdict)


def _range_of(text: str | None) -> tuple[int, int] | None:
    """``3-5``, or ``4``, as the first and the last, counted from 1."""
    if text is None:
        return None
    match = _RANGE.fullmatch(text.strip())
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise UserError(f"--graphs {text[:40]}: expected two numbers such as 3-5, the first graph is 1")
    return first, last


COMMANDS = (
    Command(
        LLAMA_CPP,
        with_files(watch, _formats()),
        (
            "llamadiff watch -- llama-mtmd-cli -m model.gguf --mmproj mmproj.gguf --image cat.png -p What?",
            "llamadiff watch --every 50 -o report.html -- llama-server -m model.gguf",
        ),
        takes_program=True,
    ),
)
