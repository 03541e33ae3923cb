"""The commands around the judging: a checkpoint's code, other settings, many cases, saved ops, files alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from llamadiff.cli.inputs import Asked, bytes_of, range_of, settings_of
from llamadiff.cli.options import JUDGEMENT, Chat, LlamaCpp, Model, NPredict, Prompt, Tokens, finish
from llamadiff.cli.reports import Reports
from llamadiff.system.collisions import kept, refuse_collisions


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
    from llamadiff.extras.port.page import print_port
    from llamadiff.extras.port.run import port as run_port
    from llamadiff.report.status_line import progress
    from llamadiff.report.terminal.report import make_console

    asked = Asked(prompt, tokens, n_predict=n_predict, llama_cpp=llama_cpp)
    refuse_collisions([("the model", model), ("the checkpoint", Path(checkpoint)), *asked.files], reports.named)
    with progress() as shown:
        found = run_port(model, checkpoint, asked.run(), How(progress=shown))
    reports.write(found, lambda each: print_port(each, make_console()))
    finish(found.verdict)


def tiny(
    checkpoint: Annotated[
        Path,
        typer.Argument(help="A checkpoint's directory: its config.json and tokenizer are enough.", metavar="CHECKPOINT",
                       exists=True, file_okay=False),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The folder to make.", metavar="FOLDER", show_default=False)
    ],
    converter: Annotated[
        Path,
        typer.Option(help="llama.cpp's convert_hf_to_gguf.py, as you have it; it is run.", metavar="FILE",
                     show_default=False),
    ],
    golden: Annotated[
        bool, typer.Option("--golden", help="Record what the model's own code gives, for check.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the weights.", min=0, max=1 << 31)] = 1,
) -> None:  # fmt: skip
    """Make the same architecture, small and random, with its .gguf: for port, and for the CI of an engine."""
    from llamadiff.extras.port.tiny import tiny as make
    from llamadiff.report.status_line import progress
    from llamadiff.report.terminal.report import make_console

    with progress() as shown:
        made = make(checkpoint, output, converter, golden, seed, shown)
    size = made.gguf.stat().st_size / 1e6
    console = make_console()
    console.print(f"{made.gguf}: {made.layers} layers, {made.parameters} parameters, {size:.1f} MB", markup=False)
    console.print(f'Next: llamadiff port {made.gguf} {made.folder} "Once upon a time" --llama-cpp BUILD', markup=False)
    if made.golden is not None:
        console.print(f"      llamadiff check {made.golden} --candidate YOUR_DUMP", markup=False)


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
    """Hold a tokenizer against llama.cpp's and an independent one: the smallest text on which they part, and why."""
    from llamadiff.extras.tokens.back import back as run_back
    from llamadiff.extras.tokens.page import print_back, print_tokens
    from llamadiff.extras.tokens.run import Wanted
    from llamadiff.extras.tokens.run import tokens as run_tokens
    from llamadiff.report.status_line import progress
    from llamadiff.report.terminal.report import make_console
    from llamadiff.system.errors import UserError

    refuse_collisions([("the model", model), ("the texts", texts)], reports.named)
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
    """Hold a renderer of prompts against the model's chat template: the smallest conversation that parts, and why."""
    from llamadiff.extras.templates.page import print_templates
    from llamadiff.extras.templates.run import template as run_template
    from llamadiff.report.status_line import progress
    from llamadiff.report.terminal.report import make_console

    refuse_collisions([("the model", model), ("the candidate", Path(candidate))], reports.named)
    with progress() as shown:
        found = run_template(model, candidate, timeout, shown)
    reports.write(found, lambda each: print_templates(each, make_console()))
    finish(found.verdict)


WHERE = "Where it runs"


def sweep(
    plan: Annotated[Path, typer.Argument(help="A TOML file: models, prompts, candidates, settings.", metavar="FILE")],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="The directory of its rows.", metavar="DIR", show_default="FILE.results"),
    ] = None,
    jobs: Annotated[
        int,
        typer.Option("--jobs", min=0, max=512, help="Cases at a time; 0: as many as cores.", rich_help_panel=WHERE),
    ] = 0,
    scheduler: Annotated[
        str | None,
        typer.Option("--scheduler", help="A Dask cluster's.", metavar="tcp://HOST:PORT", rich_help_panel=WHERE),
    ] = None,
    *, reports: Reports,
) -> None:  # fmt: skip
    """Judge models x prompts x candidates x settings; rows are kept as Parquet, and what is done is not done again."""
    from llamadiff.extras.sweep.case import SweepRow
    from llamadiff.extras.sweep.page import line_of, print_sweep
    from llamadiff.extras.sweep.run import run_sweep
    from llamadiff.report.status_line import progress
    from llamadiff.report.terminal.report import make_console

    refuse_collisions([("the sweep file", plan)], reports.named)
    folder = out if out is not None else plan.with_suffix(".results")
    with progress() as shown:

        def tell(row: SweepRow, done: int, of: int) -> None:
            shown("judging", done, of)
            typer.echo(line_of(row, done, of), err=True)

        found = run_sweep(plan, folder, tell, jobs, scheduler)
    reports.write(found, lambda each: print_sweep(each, make_console()))
    finish(found.verdict)


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
    """Run llama.cpp against itself: flash attention, caches, batches, threads, devices; one line for each."""
    from llamadiff.engines.run_spec import How
    from llamadiff.report.status_line import progress
    from llamadiff.report.terminal.report import make_console
    from llamadiff.report.variants import print_variants
    from llamadiff.verbs.variants import run_variants

    asked = Asked(prompt, tokens, chat, n_predict, llama_cpp)
    refuse_collisions([("the model", model), *asked.files], reports.named)
    with progress() as shown:
        how = How(progress=shown, pictures=reports.pictures)
        random = (f"schedule={schedule},seed={seed}",) if schedule else ()
        found = run_variants(model, asked.run(), how, (*(only or ()), *random), timeout)
    judged = [(Path(row.name), row.comparison) for row in found.rows if row.comparison is not None]
    reports.write_several(judged, [(Path(row.name), row.failed) for row in found.rows if row.failed])
    reports.write_own(found)
    if not reports.takes_standard_output:
        print_variants(found, make_console())
    finish(found.verdict)


def replay(
    paths: Annotated[list[Path], typer.Argument(help="Ops that backend --keep saved.", metavar="OP...")],
    llama_cpp: LlamaCpp = None,
    *,
    reports: Reports,
) -> None:
    """Run saved ops again through ggml's own API, on any build and device, and say how far off they are."""
    from llamadiff.report.op_runs import line_of
    from llamadiff.result.comparison import verdict_of
    from llamadiff.verbs.one_op import run_ops

    refuse_collisions([("the op", path) for path in paths], reports.named)
    found = run_ops(paths, settings_of(llama_cpp))
    reports.write(found, lambda runs: typer.echo("\n".join(map(line_of, runs))))
    finish(verdict_of(found))


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
    """Run any program that computes ggml graphs, and judge their nodes: vision, speech, images, a server at work."""
    from llamadiff.engines.run_spec import How
    from llamadiff.llamacpp.watch_run import Bounds
    from llamadiff.report.terminal.report import make_console
    from llamadiff.report.watched import print_watched
    from llamadiff.verbs.watch import watch_program

    refuse_collisions([], [*kept(keep), *reports.named])
    sizes = bytes_of(max_waiting, "--max-waiting"), bytes_of(max_weights, "--max-weights")
    bounds = Bounds(range_of(graphs), first, every, nodes, *sizes, bytes_of(max_node, "--max-node"))
    found = watch_program(program, bounds, How(pictures=reports.pictures), keep, settings_of(llama_cpp))
    reports.write_several(found.graphs)
    print_watched(found.graphs, found.said, found.ended, make_console(sys.stderr))
    finish(found.verdict)


Other = Annotated[
    Path | None,
    typer.Argument(
        help="A .gguf file, a Hugging Face directory, or a directory of your engine's weights.",
        metavar="OTHER",
        show_default=False,
    ),
]


def weights(model: Model, other: Other = None, *, reports: Reports) -> None:
    """Is the file right? List every tensor; with OTHER, compare each with another file, a checkpoint or a dump."""
    from llamadiff.report.status_line import progress
    from llamadiff.report.terminal.report import make_console
    from llamadiff.report.weights import render_weights
    from llamadiff.weights.opening import files_of, judge_weights

    refuse_collisions([*files_of("the model", model), *files_of("the other side", other)], reports.named)
    with progress() as tell:
        report = judge_weights(model, other, tell)
    reports.write(report, lambda found: render_weights(found, make_console()))
    finish(report.verdict)


def vectors(directory: Annotated[Path, typer.Argument(help="A new directory.", show_default=False)]) -> None:
    """Write test blocks of every ggml type, and what they decode to, for engines in any language."""
    from llamadiff.report.status_line import progress
    from llamadiff.weights.vectors import write_vectors

    with progress() as tell:
        count = write_vectors(directory, tell)
    typer.echo(f"{count} types in {directory}", err=True)
