"""Saved ops that were run again -> a line for each, and a block of Markdown for a bug report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from llamadiff import __version__
from llamadiff.ext.replay.kernel_report import kernels_to_json, kernels_to_markdown, lines_of
from llamadiff.ext.replay.kernel_result import KernelRun
from llamadiff.ext.replay.result import OpRun
from llamadiff.judge.verdict import WRONG, worst_of
from llamadiff.report.formats import About
from llamadiff.report.github import again, block, code, fit_sections, prose, table
from llamadiff.report.json import in_json
from llamadiff.report.terminal.escape import escape_line, number, tiny

SCHEMA = "llamadiff.replay/1"
_MOST_OPS = 40  # that a block tells of


def line_of(run: OpRun) -> str:
    """What the terminal says of one op."""
    return (
        f"{run.verdict.upper():6} {escape_line(run.name)}: {run.op} {run.inputs} on {escape_line(run.device)}: own "
        f"error {run.error:.1e}, limit {run.limit:.0e}; {run.recorded:.1e} where it was saved{_why(run)}"
    )


def _why(run: OpRun) -> str:
    return f"; not judged, {run.problem}" if run.problem else ""


def to_json(runs: Sequence[OpRun] | Sequence[KernelRun]) -> str:
    """Everything, machine-readable: of ops that ran in ggml, or of a kernel."""
    of_kernel = [run for run in runs if isinstance(run, KernelRun)]
    if of_kernel:
        return kernels_to_json(of_kernel)
    own = [run for run in runs if isinstance(run, OpRun)]
    return in_json({
        "schema": SCHEMA, "llamadiff": {"version": __version__}, "verdict": worst_of(run.verdict for run in own),
        "summary": line_of(min(own, key=lambda run: (run.verdict != WRONG, not run.problem))),
        "ops": [_as_json(run) for run in own],
    })  # fmt: skip


def _as_json(run: OpRun) -> dict[str, Any]:
    return {
        "op": run.op, "node": run.name, "path": str(run.path), "inputs": run.inputs, "device": run.device,
        "verdict": run.verdict, "nmse": run.error, "limit": run.limit, "recorded_nmse": run.recorded,
        "index": run.index, "found": run.found, "right": run.right, "problem": run.problem or None,
    }  # fmt: skip


def to_text(runs: Sequence[OpRun] | Sequence[KernelRun]) -> str:
    """What the terminal says of all."""
    return "\n".join(line for run in runs for line in ([line_of(run)] if isinstance(run, OpRun) else lines_of(run)))


def markdown_of(runs: Sequence[OpRun] | Sequence[KernelRun], about: About) -> str:
    """A block for an issue."""
    of_kernel = [run for run in runs if isinstance(run, KernelRun)]
    if of_kernel:
        return kernels_to_markdown(of_kernel, about)
    return to_markdown([run for run in runs if isinstance(run, OpRun)], about)


def to_markdown(runs: Sequence[OpRun], about: About) -> str:
    """The runs, those that are wrong first, no longer than GitHub takes."""
    ordered = sorted(runs, key=lambda run: (run.verdict != WRONG, not run.problem))
    return fit_sections(_sections(ordered[:_MOST_OPS], len(runs), about))


def _sections(runs: Sequence[OpRun], count: int, about: About) -> Iterator[str]:
    wrong, unjudged = [run for run in runs if run.verdict == WRONG], [run for run in runs if run.problem]
    first = next(iter((*wrong, *unjudged)), runs[0])
    yield f"### {_title(first, len(wrong), len(unjudged), count)}"
    yield (
        "Each op ran alone, on inputs that a real run had. The right values are computed from the same inputs in NumPy."
    )
    titles = ("", "node", "op", "inputs", ">own error", ">limit", ">where it was saved", "furthest off")
    yield table(titles, map(_cells, runs))
    yield from again(about)
    yield from _lines(runs)


def _title(first: OpRun, wrong: int, unjudged: int, count: int) -> str:
    if not wrong and unjudged:
        return f"UNCHECKED: {unjudged} of {count} saved ops not judged, {first.problem}, on {prose(first.device, 60)}"
    if not wrong:
        return f"MATCH: {count} of {count} saved ops right on {prose(first.device, 60)}"
    others = f", and {wrong - 1} more of {count} ops" if wrong > 1 else ""
    return f"WRONG: {code(first.op)} {code(first.inputs)} on {prose(first.device, 60)}{others}"


def _cells(run: OpRun) -> Iterable[str]:
    off = f"{code(str(list(run.index)))} is {number(run.found)}, {number(run.right)} is right" if run.error else ""
    verdict = f"**{run.verdict.upper()}**" if run.verdict == WRONG else run.verdict
    return (
        verdict, code(run.name, 60), code(run.op), code(run.inputs), tiny(run.error), tiny(run.limit),
        tiny(run.recorded), off,
    )  # fmt: skip


def _lines(runs: Sequence[OpRun]) -> Iterator[str]:
    """The ops as ggml's own tests read them, which make up the inputs."""
    lines = list(dict.fromkeys(escape_line(run.line.strip(), 2000) for run in runs))
    if any(lines):
        yield "The same for `test-backend-ops test --test-file FILE`, on inputs of its own:"
        yield block("\n".join(lines))
