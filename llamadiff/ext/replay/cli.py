"""The command replay."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from llamadiff.cli.command import LLAMA_CPP, Command
from llamadiff.cli.inputs import settings_of
from llamadiff.cli.options import ENGINE, LlamaCpp, finish
from llamadiff.cli.reports import Reports, with_files
from llamadiff.report.formats import Format
from llamadiff.system.collisions import refuse_collisions
from llamadiff.system.errors import UserError
from llamadiff.system.output import made_directory

FORMATS = (
    Format("json", (".json",), "ext.replay.report:to_json", plain=True),
    Format("markdown", (".md", ".markdown"), "ext.replay.report:markdown_of"),
)

Candidate = Annotated[
    str | None,
    typer.Option(
        "--candidate", metavar="WHAT", rich_help_panel=ENGINE,
        help="A kernel instead of ggml: cmd: ./kernel {op} {out}, or python:FILE.py:FUNCTION; tried on cases around "
        "each op too.",
    ),
]  # fmt: skip
Seed = Annotated[
    int | None,
    typer.Option("--seed", metavar="N", rich_help_panel=ENGINE, min=0, help="Makes a kernel's cases; 0 without."),
]
Seconds = Annotated[
    float | None,
    typer.Option("--timeout", metavar="SECONDS", rich_help_panel=ENGINE, min=1, help="A kernel's, for one case; 60."),
]
Keep = Annotated[
    Path | None,
    typer.Option("--keep", rich_help_panel=ENGINE, metavar="DIR", help="Save each case in which a kernel is wrong."),
]
NoTolerance = Annotated[str | None, typer.Option("--tolerance", hidden=True)]


def replay(
    paths: Annotated[list[Path], typer.Argument(help="Ops that backend --keep saved.", metavar="OP...")],
    candidate: Candidate = None, seed: Seed = None, timeout: Seconds = None, keep: Keep = None,
    llama_cpp: LlamaCpp = None, tolerance: NoTolerance = None, *, reports: Reports,
) -> None:  # fmt: skip
    """Run saved ops again, on any build and device.

    Through ggml's own API; it says how far off they are. Or try a kernel of your own on them."""
    from llamadiff.ext.replay.report import to_text
    from llamadiff.ext.replay.run import run_ops
    from llamadiff.result.comparison import verdict_of

    if tolerance is not None:
        raise UserError(f"--tolerance {tolerance[:80]}: limits come from an op's own data; leave it out")
    refuse_collisions([("the op", path) for path in paths], reports.output_files)
    if candidate is not None:
        _try(paths, candidate, seed, timeout, keep, llama_cpp, reports)
    for option, value in (("--seed", seed), ("--timeout", timeout), ("--keep", keep)):
        if value is not None:
            raise UserError(f"{option} {value}: is about a kernel; give --candidate with it")
    found = run_ops(paths, settings_of(llama_cpp))
    reports.write(found, lambda runs: typer.echo(to_text(runs)))
    finish(verdict_of(found))


def _try(
    paths: list[Path], candidate: str, seed: int | None, timeout: float | None, keep: Path | None,
    llama_cpp: list[str] | None, reports: Reports,
) -> NoReturn:  # fmt: skip
    """Try a kernel on saved ops."""
    from llamadiff.ext.replay.kernel import Trial, kept_names, try_kernel
    from llamadiff.ext.replay.kernel_run import Kernel
    from llamadiff.ext.replay.report import to_text
    from llamadiff.report.status_line import progress
    from llamadiff.result.comparison import verdict_of

    if llama_cpp:
        raise UserError(f"--llama-cpp {llama_cpp[0][:80]}: a kernel runs without llama.cpp; leave it out")
    kernel = Kernel.of(candidate)
    read = [("the op", path) for path in paths] + [("the kernel", path) for path in kernel.files]
    kept = [] if keep is None else [("--keep", keep / name) for name in kept_names(paths, seed or 0)]
    refuse_collisions(read, [*kept, *reports.output_files])
    with progress() as shown, nullcontext() if keep is None else made_directory(keep):
        trial = Trial(seed or 0, timeout or 60.0, keep, shown)
        found = [try_kernel(path, kernel, trial) for path in paths]
    reports.write(found, lambda runs: typer.echo(to_text(runs)))
    finish(verdict_of(found))


COMMANDS = (
    Command(
        LLAMA_CPP,
        with_files(replay, FORMATS),
        (
            "llamadiff replay wrong-ops/*.safetensors --llama-cpp ../llama.cpp",
            "llamadiff replay op.safetensors --candidate 'cmd: ./kernel {op} {out}'",
        ),
    ),
)
