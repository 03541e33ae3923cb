"""Comparison -> a block of Markdown that fits a GitHub issue, a comment or the summary of a job."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from llamadiff import __version__
from llamadiff.ext.page.data import told_tokens
from llamadiff.ext.page.failure import lines_of_failure
from llamadiff.judge.verdict import MATCH, UNCHECKED, WRONG, is_right, worst_of
from llamadiff.report.facts import model_facts, run_fact, settings_of
from llamadiff.report.formats import MOST as LONGEST
from llamadiff.report.formats import About
from llamadiff.report.github import again, code, fit_sections, fold, prose, table, token
from llamadiff.report.tables import tables_of
from llamadiff.report.terminal.escape import number, times, tiny
from llamadiff.report.terminal.tap_lines import layer_lines, own_error, times_limit
from llamadiff.result.comparison import Comparison, ask_normal
from llamadiff.result.diagnosis import Diagnosis
from llamadiff.result.logits import Logits, TopToken
from llamadiff.result.rows import Row
from llamadiff.words import diagnosis_text as say
from llamadiff.words.blame import headline, proof

_FEW_LAYERS = 12  # that are not folded away
_LAYERS = 160  # lines of the table of layers
_AROUND = 5  # taps before and after the first divergence
_CAUSES, _STEPS, _PROOF = 8, 6, 1500
_CHECKED = 400  # traces that a table lists


def to_markdown(comparison: Comparison, about: About) -> str:
    """The report, no longer than GitHub takes."""
    return fit_sections(_sections(comparison, about))


def checks_to_markdown(results: Sequence[tuple[Path, Comparison]], about: About) -> str:
    """A line for each run, or trace, then ten of each that is not right, as far as they fit."""
    lines = [
        (_strong(result.verdict), code(path.as_posix()), prose(result.headline, 200))
        for path, result in results[:_CHECKED]
    ]
    lines += [("refused", code(path.as_posix()), prose(reason, 200)) for path, reason in about.refused[:_CHECKED]]
    verdict = worst_of((result.verdict for _, result in results), about.refused)
    right = sum(is_right(result.verdict) for _, result in results)
    head = [
        f"### {verdict.upper()}: {right} of {len(results) + len(about.refused)} runs are right",
        table(("", "run", ""), lines),
    ]
    wrong = [each for each in results if not is_right(each[1].verdict)]
    return fit_sections(chain(head, again(about), (_checked(path, result, about) for path, result in wrong)))


def _checked(path: Path, result: Comparison, about: About) -> str:
    """One that failed, in ten lines; the whole of it is a page, by the command that stands there."""
    lines = [
        f"- {label}: {code(text, LONGEST) if label == 'run' else prose(text, _PROOF)}"
        for label, text in lines_of_failure(path, result, about.command)
    ]
    return "\n".join((f"{_strong(result.verdict)} {code(path.as_posix())}: {prose(result.headline, 600)}", "", *lines))


def _sections(c: Comparison, about: About) -> Iterator[str]:
    """The parts of a report, those that matter most first."""
    yield f"### {c.verdict.upper()}: {prose(c.headline, 600)}"
    if c.proof:
        yield prose("; ".join(c.proof), _PROOF)
    yield from chain(_before(c), _steps(c), again(about))
    yield from chain(_causes(c), _tables(c), _around(c), _logits(c), _layers(c), _normal(c), _subject(c))


def _before(c: Comparison) -> Iterator[str]:
    """What was not right before the layers."""
    checks = [check for check in c.preflight if check.verdict != MATCH]
    if checks:
        lines = [f"- {_strong(check.verdict)} {code(check.name, 60)}: {prose(check.found, 600)}" for check in checks]
        yield "\n".join(lines[:_STEPS])


def _steps(c: Comparison) -> Iterator[str]:
    """What to do."""
    if c.next_steps:
        yield "\n".join(f"- {prose(step, 600)}" for step in c.next_steps[:_STEPS])


def _causes(c: Comparison) -> Iterator[str]:
    """Every known bug with its proof, then what was only read back."""
    if c.diagnosis:
        more = [f"- and {len(c.diagnosis) - _CAUSES} more"] if len(c.diagnosis) > _CAUSES else []
        told = [f"- {_cause(d, c)}" for d in c.diagnosis[:_CAUSES]]
        yield "\n".join(["**Causes**", "", *told, *more])


def _cause(d: Diagnosis, c: Comparison) -> str:
    found = headline(d, c.rows)
    if not d.known:
        return f"unknown: {prose(found, 1000)}"
    said = "as above" if found == c.headline else "; ".join((found, *proof(d, c.rows)))
    fixed = "no mistake: noise" if d.harmless else say.fix(d)
    known = [source for source in d.causes[0].source.split(", ") if source]
    # threads by name alone: an address would leave a note in each of them
    others = f"; known from {', '.join(map(code, known))}" if known else ""
    return f"{code(say.names(d.causes))} {prose(said, 1000)}. {_capital(prose(fixed, 600))}{others}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


_TAP_TITLES = ("tap", "", ">own error", ">dB", ">x limit", ">drift", ">x rounding", ">cosine")


def _around(c: Comparison) -> Iterator[str]:
    """The taps around the first divergence, in graph order, with both sides' size."""
    first = c.leading
    if first is None:
        return
    at = c.rows.index(first)
    start = max(0, at - _AROUND)
    rows = c.rows[start : at + _AROUND + 1]
    names = _names(c)
    lines = [
        (_tap(row), *_errors(row, row), *(number(side.rms) if side else "" for side in (row.baseline, row.candidate)))
        for row in rows
    ]
    titles = (*_TAP_TITLES, f">rms {names[0]}", f">{names[1]}")
    yield f"**Around {code(first.tap)}**\n\n{table(titles, lines)}"


def _tables(c: Comparison) -> Iterator[str]:
    """What slices found besides."""
    for title, titles, cells in tables_of(c):
        written = table(titles, [tuple(code(cell, 80) if cell else "" for cell in line) for line in cells])
        yield fold(title, written) if len(cells) > _FEW_LAYERS else f"**{title}**\n\n{written}"


def _names(c: Comparison) -> tuple[str, str]:
    """What both sides are called in titles."""
    candidate = "engine" if c.is_engine else str(c.candidate.get("name") or "candidate")
    return prose(str(c.baseline.get("name") or "baseline"), 20), prose(candidate, 20)


def _tap(row: Row) -> str:
    return f"**{code(row.tap, 60)}**" if row.verdict == WRONG else code(row.tap, 60)


def _errors(worst: Row, last: Row) -> tuple[str, ...]:
    """Verdict, own error, that in dB, over its limit; drift, that over what rounding explains, and cosine."""
    local, drift, ratio = worst.local, last.drift, last.ratio_to_noise
    own = own_error(worst)
    return (
        _strong(worst.verdict), own, _decibels(local.nmse) if own and local else "", times_limit(worst),
        tiny(drift.nmse) if drift else "", times(ratio) if ratio else "", f"{drift.cosine:.6f}" if drift else "",
    )  # fmt: skip


def _decibels(nmse: float) -> str:
    level = decibels(nmse)
    return f"{level:.0f}" if math.isfinite(level) else ""


def decibels(nmse: float) -> float:
    """An NMSE as a level: -60 is a millionth; minus infinity for none."""
    return 10 * math.log10(nmse) if nmse > 0 else -math.inf


def _strong(verdict: str) -> str:
    return f"**{verdict.upper()}**" if verdict in (WRONG, UNCHECKED) else verdict


def _layers(c: Comparison) -> Iterator[str]:
    """A line for each layer: its worst op, and where its output drifted to."""
    lines = layer_lines(c)
    if len(lines) < 2:
        return
    titles = ("layer", "worst op", *_TAP_TITLES[1:])
    cells = [
        (", ".join(map(str, line.layers)), code(line.worst.tap, 60), *_errors(line.worst, line.last))
        for line in lines[:_LAYERS]
    ]
    left = f"\n\n{len(lines) - _LAYERS} more layers are in the JSON report." if len(lines) > _LAYERS else ""
    written = f"{table(titles, cells)}{left}"
    title = f"{len(lines)} parts of the model, from the embedding to the logits"
    yield fold(title, written) if len(lines) > _FEW_LAYERS else f"**Layers**\n\n{written}"


def _normal(c: Comparison) -> Iterator[str]:
    """Whether the layers' outputs are normal: a sentence each, and what is usual."""
    found = ask_normal(c)
    if found is not None:
        told = [f"- {prose(answer.says, 1000)}" for answer in found.answers]
        usual = [f"- usual: {prose(each.what, 600)} ({prose(each.source, 300)})" for each in found.usual]
        yield fold("Is it normal?", "\n".join([*told, *usual]))


def _logits(c: Comparison) -> Iterator[str]:
    """How far apart both sides' next tokens are, and their first ones."""
    if c.logits is None:
        return
    lines = [_top(token) for token in told_tokens(c.logits)]
    names = _names(c)
    titles = (">rank", ">id", "token", f">{names[0]}", f">{names[1]}", ">rank there")
    grid = f"\n\n{table(titles, lines)}" if lines else ""
    yield f"**Logits**: {_distance(c.logits)}{grid}"


def _distance(logits: Logits) -> str:
    """KL, whether the first token is the same, and in how many rows."""
    if logits.not_finite:
        return f"the last row of the {' and of the '.join(logits.not_finite)} holds NaN or Inf"
    apart = "not all were recorded" if logits.partial else f"KL {tiny(logits.kl)} nats"
    first = {None: "first token unknown", True: "same first token", False: "another first token"}[logits.top1_agree]
    return f"{apart}; {first}; {logits.agreeing} of {logits.rows} rows have the same first token"


def _top(top: TopToken) -> tuple[str, ...]:
    unknown = math.isnan(top.candidate)
    there = "-" if unknown else str(top.candidate_rank)
    return (
        str(top.rank), str(top.id), "" if top.text is None else token(top.text), number(top.baseline),
        "-" if unknown else number(top.candidate), f"**{there}**" if top.rank != top.candidate_rank else there,
    )  # fmt: skip


def _subject(c: Comparison) -> Iterator[str]:
    """The model, the run, the settings of both sides, and who wrote this."""
    facts = [prose(fact, 60) for fact in model_facts(c.model, full=True)]
    lines = [("model", f"{code(str(c.model.get('file') or 'unknown'))} {', '.join(facts)}")]
    if c.model.get("sha256"):
        lines.append(("sha256", code(str(c.model["sha256"]), 80)))
    if c.tokens:
        lines.append(("run", run_fact(c) + (f": {token(c.prompt, 300)}" if c.prompt is not None else "")))
    for role, side in (("baseline", c.baseline), ("candidate", c.candidate)):
        version = f" {code(str(side['version']), 80)}" if side.get("version") else ""
        settings = " ".join(code(setting, 80) for setting in settings_of(side)[:30])
        lines.append((role, f"{prose(str(side.get('name') or 'unnamed'), 60)}{version} {settings}".rstrip()))
    seconds = f", {c.timing['total_s']:.1f} s" if "total_s" in c.timing else ""
    lines.append(("judged by", f"llamadiff {__version__}{seconds}"))
    yield table(("", ""), lines)
