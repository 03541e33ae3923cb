"""A kernel's runs on saved ops -> the sentences on a terminal, JSON, and a block of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import isfinite
from typing import Any

from llamadiff import __version__
from llamadiff.ext.replay.common import EVERYWHERE
from llamadiff.ext.replay.kernel_result import CaseRun, KernelRun, Place
from llamadiff.judge.verdict import WRONG, is_right, worst_of
from llamadiff.report.formats import About
from llamadiff.report.github import again, code, fit_sections, prose, table
from llamadiff.report.json import in_json
from llamadiff.report.terminal.escape import escape_line, number
from llamadiff.system.commands import quote

SCHEMA = "llamadiff.kernel/1"
_MOST_CASES = 40  # that a block tells of


def summary_of(run: KernelRun) -> str:
    """The verdict in a sentence: which cases are right, what the wrong ones have in common, the smallest of them."""
    what = f"{escape_line(run.name)}: {run.op} by {escape_line(run.label, 60)}"
    every, wrong = len(run.cases), run.wrong
    right = sum(case.is_right for case in run.cases)
    cases = f"{every} case{'s' * (every > 1)}"
    if wrong:
        where = f", {run.common}" if run.common not in ("", EVERYWHERE) else ""
        smallest = wrong[0]
        named = "" if every == 1 else f"; the smallest ({smallest.title}) "
        return f"{what} is wrong in {len(wrong)} of {cases}{where}{named or ': it '}{_fault(smallest)}"
    if run.unjudged:
        first = run.unjudged[0]
        beside = f"is right in {right} of {cases}, and not judged in {len(run.unjudged)}"
        return f"{what} {beside}; {first.title}: it {escape_line(first.problem, 300)}"
    ways = sorted({case.arithmetic for case in run.cases} - {"F32", ""})
    rounded = f", where it rounds as llama.cpp may: {', '.join(ways)}" if ways else ""
    return f"{what} is right in {'the' if every == 1 else 'all'} {cases}{rounded}"


def _fault(case: CaseRun) -> str:
    if case.place is None:
        return escape_line(case.problem, 300)
    at = case.place
    spans = " and ".join(filter(None, (at.rows, at.columns)))
    extent = f"in {at.wrong} of {at.count} values{f', {spans}' if spans else ''}"
    found, right = _told_apart(at.found, at.right)
    off = f", off by {number(at.error)}, limit {number(at.limit)}" if isfinite(at.error) else ""
    worst = f"furthest at {list(at.index)}: {found} where {right} is right{off}"
    return f"goes wrong first at row {at.row}, column {at.column}, {extent}; {worst}"


def _told_apart(found: float, right: float) -> tuple[str, str]:
    """Two numbers, with as many digits as tell them apart."""
    forms = (number, *(f"{{:.{digits}g}}".format for digits in (4, 5, 6, 7, 8, 9, 12, 17)))
    pairs = [(form(found), form(right)) for form in forms]
    return next((pair for pair in pairs if pair[0] != pair[1]), pairs[0])


def next_steps_of(run: KernelRun) -> list[str]:
    """What to do now."""
    wrong = next((case for case in run.wrong if case.path is not None), None)
    steps = [case.next_step for case in (*run.wrong, *run.unjudged) if case.next_step][:1]
    if wrong is not None and wrong.number:
        steps.append(f"llamadiff replay {quote(str(wrong.path))} --candidate {quote(run.kernel)}")
    elif run.wrong and run.wrong[0].number:
        steps.append("--keep DIR keeps each wrong case as an op's file, which is replayed alone")
    return steps


def lines_of(run: KernelRun) -> Iterator[str]:
    """What the terminal says."""
    yield f"{run.verdict.upper():6} {summary_of(run)}"
    yield f"       seed {run.seed}; {_groups(run.cases)}"
    for step in next_steps_of(run):
        yield f"       next: {escape_line(step, 1000)}"


def _groups(cases: Sequence[CaseRun]) -> str:
    """Titles of the wrong cases, or which kinds were tried."""
    wrong = [case.title for case in cases if not case.is_right]
    if not wrong:
        kinds = dict.fromkeys(case.values for case in cases)
        return f"tried: {', '.join(kinds)}"
    more = f", and {len(wrong) - 6} more" if len(wrong) > 6 else ""
    return f"not right: {'; '.join(wrong[:6])}{more}"


def kernels_to_json(runs: Sequence[KernelRun]) -> str:
    """Everything, machine-readable."""
    verdict = worst_of(run.verdict for run in runs)
    first = next((run for run in runs if run.verdict == verdict), runs[0])
    return in_json({
        "schema": SCHEMA, "llamadiff": {"version": __version__}, "verdict": verdict, "summary": summary_of(first),
        "ops": [_op(run) for run in runs],
    })  # fmt: skip


def _op(run: KernelRun) -> dict[str, Any]:
    return {
        "op": run.op, "node": run.name, "path": str(run.path), "candidate": run.kernel, "verdict": run.verdict,
        "summary": summary_of(run), "seed": run.seed, "common": run.common or None,
        "smallest_wrong": next((case.number for case in run.wrong), None), "next_steps": next_steps_of(run),
        "cases": [_case(case) for case in run.cases],
    }  # fmt: skip


def _case(case: CaseRun) -> dict[str, Any]:
    return {
        "case": case.number, "title": case.title, "verdict": case.verdict, "sizes": case.sizes, "values": case.values,
        "inputs": case.inputs, "arithmetic": case.arithmetic or None, "problem": case.problem or None,
        "next_step": case.next_step or None, "path": None if case.path is None else str(case.path),
        "wrong": None if case.place is None else _place(case.place),
    }  # fmt: skip


def _place(at: Place) -> dict[str, Any]:
    return {
        "values": at.wrong, "of": at.count, "row": at.row, "column": at.column, "rows": at.rows or None,
        "columns": at.columns or None, "index": at.index, "found": at.found, "right": at.right, "error": at.error,
        "limit": at.limit,
    }  # fmt: skip


def kernels_to_markdown(runs: Sequence[KernelRun], about: About) -> str:
    """A block for an issue."""
    return fit_sections(_sections(sorted(runs, key=lambda run: run.verdict != WRONG), about))


def _sections(runs: Sequence[KernelRun], about: About) -> Iterator[str]:
    for run in runs:
        yield f"### {run.verdict.upper()}: {prose(summary_of(run), 600)}"
        cases = sorted(run.cases, key=lambda case: is_right(case.verdict))[:_MOST_CASES]
        yield table(("", "case", "inputs", "first wrong", ">off by", ">limit"), map(_cells, cases))
    yield from again(about)


def _cells(case: CaseRun) -> Iterable[str]:
    at = case.place
    where = f"row {at.row}, column {at.column}" if at is not None else prose(case.problem, 100)
    verdict = f"**{case.verdict.upper()}**" if case.verdict == WRONG else case.verdict
    off = ("", "") if at is None else (number(at.error), number(at.limit))
    return (verdict, prose(case.title, 100), code(case.inputs, 100), where, *off)
