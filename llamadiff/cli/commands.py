"""The core's commands. Each parses, calls, renders and exits: 0 match or noise, 1 wrong, 2 could not tell."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llamadiff import plugins
from llamadiff.cli import listings
from llamadiff.cli import options as opt
from llamadiff.cli.command import CI, START, Command
from llamadiff.cli.inputs import RunOptions, prompt_or_trace, rules_of, settings_of, token_ids
from llamadiff.cli.options import finish
from llamadiff.cli.reports import Reports, with_reports, with_reports_of_several
from llamadiff.system.collisions import Named, refuse_collisions, saved_files
from llamadiff.system.errors import UserError
from llamadiff.system.output import make_room

if TYPE_CHECKING:
    from llamadiff.engines.run_spec import How


def compare(
    model: opt.Model, prompt: opt.PromptOrTrace = None, tokens: opt.Tokens = None, chat: opt.Chat = False,
    n_predict: opt.NPredict = 0, candidate: opt.Candidate = None, steps: opt.Steps = None, name_map: opt.NameMap = None,
    timeout: opt.Timeout = 600.0, only: opt.Only = None, rows: opt.Rows = None, partial: opt.Partial = False,
    llama_cpp: opt.LlamaCpp = None, engine: opt.Engine = None, explain: opt.Explain = 0.0,
    tolerance: opt.Tolerance = None, fail_on: opt.FailOn = "wrong", expect: opt.Expect = None,
    force: opt.Force = False, *, reports: Reports,
) -> None:  # fmt: skip
    """Say which operation of an engine is wrong, and why."""
    prompt, candidate = prompt_or_trace(model, prompt, candidate)
    asked = RunOptions(prompt, tokens, chat, n_predict, llama_cpp, only, takes_candidate=True)
    more = {
        "engine": engine, "explain": explain, "partial": partial, "name_map": name_map, "timeout": timeout,
        "expect": token_ids(expect, "--expect"), "steps": steps, "rows": rows,
    }  # fmt: skip
    run_compare(model, asked, candidate, tolerance, fail_on, reports, more, [("the steps", steps)], force)


def run_compare(
    model: Path, asked: RunOptions, candidate: str | None, tolerance: Path | None, fail_on: str, reports: Reports,
    more: Mapping[str, Any], files: Sequence[Named] = (), force: bool = False,
) -> None:  # fmt: skip
    """Run and judge; llama.cpp's process gets ready while what judges is imported."""
    from llamadiff.llamacpp.child import Child

    settings = asked.settings
    with Child(settings.place) as child, _progress() as progress:
        from llamadiff.verbs import verbs

        child.meanwhile.append(reports.get_ready)
        read = [*verbs.compared_files(model, candidate, more.get("name_map")), *asked.files, *files]
        refuse_collisions(
            [*read, ("the tolerance file", tolerance)], [*saved_files(reports.folder, "-o"), *reports.output_files]
        )
        for there in [path for _, path in saved_files(reports.folder) if path.exists()]:
            make_room(there, force)
        how = how_of(tolerance, reports, progress=progress, **more)
        result = verbs.compare(model, asked.run(), candidate, how, reports.folder, child)
    reports.write(result)
    finish(result.verdict, fail_on)


def how_of(tolerance: Path | None, reports: Reports, engine: str | None = None, **more: Any) -> How:
    """How a run is judged, in the words of options. Raises UserError for a tolerance file that is none."""
    from llamadiff.engines.run_spec import How

    name, _, precision = (engine or "").partition(":")
    rules, pictures = rules_of(tolerance), reports.pictures
    return How(rules, name or None, precision or "f32", pictures=pictures, **more)


def capture(
    model: opt.Model, output: Annotated[Path, typer.Option("-o", "--output", help="The trace: FILE.safetensors.")],
    prompt: opt.Prompt = None, tokens: opt.Tokens = None, chat: opt.Chat = False, n_predict: opt.NPredict = 0,
    only: opt.Only = None, llama_cpp: opt.LlamaCpp = None, sketch: opt.Sketch = False, nodes: opt.Nodes = False,
    force: opt.Force = False,
) -> None:  # fmt: skip
    """Run llama.cpp, judge its values, and keep them."""
    from llamadiff.engines.run_spec import How
    from llamadiff.trace.metadata import CHECKED
    from llamadiff.verbs import verbs

    asked = RunOptions(prompt, tokens, chat, n_predict, llama_cpp, only)
    refuse_collisions([("the model", model), *asked.files], [("--output", output)])
    run = asked.run()
    make_room(output, force)
    with _progress() as progress:
        if nodes:
            count = verbs.record_nodes(model, run, output, How(progress=progress))
            typer.echo(
                f"{output}: {count} nodes with their inputs; judge it with llamadiff backend MODEL --recorded {output}"
            )
            return
        trace = verbs.record(model, run, output, How(progress=progress), sketch)
    taken = trace.sketch.rows if trace.sketch is not None else trace
    verdict = str(trace.info.producer[CHECKED]["verdict"])
    what = f"{len(taken)} taps of {len(trace.info.tokens)} tokens, checked: {verdict.upper()}"
    from llamadiff.report.terminal.escape import escape_line

    typer.echo(f"{escape_line(str(output), 4000, plain=os.sep)}: {what}", err=True)
    raise typer.Exit(1 if verdict == "wrong" else 0)


Baseline = Annotated[Path, typer.Argument(help="The trace that is trusted.")]
UnderTest = Annotated[Path, typer.Argument(help="The trace under test.")]


def diff(
    baseline: Baseline, candidate: UnderTest, model: opt.DiffModel = None, explain: opt.Explain = 0.0,
    partial: opt.Partial = False, expect: opt.Expect = None, tolerance: opt.Tolerance = None,
    fail_on: opt.FailOn = "wrong", *, reports: Reports,
) -> None:  # fmt: skip
    """Compare two traces; with --model, judge every op."""
    from llamadiff.verbs import verbs

    traces = ("the baseline", baseline), ("the candidate", candidate)
    refuse_collisions([*traces, ("the model", model), ("the tolerance file", tolerance)], reports.output_files)
    how: dict[str, Any] = {"explain": explain, "partial": partial, "expect": token_ids(expect, "--expect")}
    with _progress() as progress:
        result = verbs.diff(baseline, candidate, model, how_of(tolerance, reports, progress=progress, **how))
    reports.write(result)
    finish(result.verdict, fail_on)


def check(
    paths: Annotated[list[Path], typer.Argument(help="Recorded traces, or directories of them.")],
    model: opt.CheckModel = None, candidate: opt.CheckCandidate = None, name_map: opt.NameMap = None,
    timeout: opt.Timeout = 600.0, jobs: opt.Jobs = 0, partial: opt.Partial = False,
    max_mean_kl: opt.MaxMean = None, max_p99_kl: opt.MaxTail = None, tolerance: opt.Tolerance = None,
    fail_on: opt.FailOn = "wrong", annotate: opt.Annotate = False, update: opt.Update = False, force: opt.Force = False,
    *, reports: Reports,
) -> None:  # fmt: skip
    """Check kept traces, or your engine on their tokens.

    It needs no llama.cpp where the reference engine runs the file."""
    from llamadiff.cli.checking import Tally
    from llamadiff.engines.run_spec import Gate
    from llamadiff.verbs import check_traces, verbs

    traces, skipped = check_traces.traces_in(paths)
    if update:
        _update(traces, model, candidate, reports, force)
    files = [("the model", model)] if candidate is None else verbs.compared_files(model, candidate, name_map)
    read = [*(("the trace", path) for path in traces), ("the tolerance file", tolerance), *files]
    refuse_collisions(read, reports.output_files)
    gate = Gate(max_mean_kl, max_p99_kl)
    how = how_of(tolerance, reports, partial=partial, name_map=name_map, timeout=timeout, gate=gate)
    tally = Tally(reports, annotate, skipped=skipped)
    for checked in check_traces.check_each(traces, model, how, candidate, jobs):
        tally.tell(checked)
    finish(tally.finish(), fail_on)


def _update(traces: Sequence[Path], model: Path | None, candidate: str | None, reports: Reports, force: bool) -> None:
    """Record captures anew, and say what changed, by the slice that does."""
    if candidate is not None or reports.output_files:
        raise UserError("--update records llama.cpp anew, and judges nothing else: give it without --candidate and -o")
    verdict = plugins.ask_first(lambda each: each.record_anew(traces, model, force))
    if verdict is None:
        raise UserError("--update: the slice that records captures anew is missing; llamadiff doctor says why")
    finish(verdict, "wrong")


def demo(llama_cpp: opt.LlamaCpp = None) -> None:
    """Compare the shipped model, right, then with a bug."""
    from llamadiff.report.terminal.report import say
    from llamadiff.verbs import demo as shipped

    with _progress() as progress:
        right, wrong = shipped.run(progress, settings_of(llama_cpp))
    Reports().write(right)
    say(f"\nThe same again, with a bug in the engine: its RoPE {shipped.BUG}.\n")
    Reports().write(wrong)
    raise typer.Exit(0 if (right.verdict, wrong.verdict) == ("match", "wrong") else 1)


def _progress() -> Any:
    """A status line on standard error, where that is a terminal."""
    from llamadiff.report.status_line import progress

    return progress()


COMMANDS = (
    Command(START, demo),
    Command(START, with_reports(compare, keeps=True), (
        'llamadiff compare model.gguf "Once upon a time"       is llama.cpp right on this machine?',
        "llamadiff compare model.gguf mine.safetensors         is my engine?",
        'llamadiff compare good.gguf "Once" --candidate small.gguf   what does its quantization cost, and where?',
        'llamadiff compare model.gguf "Once" --candidate "cmd: ./engine --tokens {tokens} --dump {out}"',
    )),
    Command(START, listings.taps, ("llamadiff taps model.gguf --json",)),
    Command(CI, capture, ('llamadiff capture model.gguf "Once upon a time" -o right.safetensors',)),
    Command(CI, with_reports_of_several(check), (
        "llamadiff check captures/ --fail-on noise             are the recordings right?",
        'llamadiff check captures/ --candidate "cmd: ./engine --tokens {tokens} --dump {out}"   is your engine?',
    )),
    Command(CI, with_reports(diff), ("llamadiff diff right.safetensors mine.safetensors --model model.gguf",)),
    Command(START, listings.doctor),
)  # fmt: skip
