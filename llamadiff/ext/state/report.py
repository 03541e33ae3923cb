"""llama.cpp's variants as a table of 80 columns, and as JSON. Computes nothing."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from llamadiff.ext.state.result import DEFAULT, Variant, Variants
from llamadiff.ext.state.variation import PREFIX
from llamadiff.judge.verdict import WRONG
from llamadiff.report.formats import command_line
from llamadiff.report.json import in_json
from llamadiff.report.terminal.escape import escape_line
from llamadiff.report.terminal.page import Page

SCHEMA = "llamadiff.variants/1"
WIDTH = 79
_NAME, _REST = 22, WIDTH - 23
_HEAD = ("variant", "wrong", "differs first at", "x rounding", "KL", "token", "s")
_LEGEND = """\
wrong             taps whose op is wrong on the inputs that it was given, and
                  what the run was given wrongly; on a device, nodes
differs first at  the first tap that is not the default's bit for bit
x rounding        how far its logits are from exact, over what rounding explains
KL, token         its next token against the default's"""
_QUOTED = re.compile(r"\(it said: (?:\w+: )*(.+?)\)?$")
_FORM = "{:22} {:>5} {:16} {:>10} {:>6} {:9} {:>5}"


def print_variants(found: Variants, console: Console, run: Sequence[str] = ()) -> None:
    """A line for each, and what is to be said of those that are wrong. ``run``: the model and the words of its run."""
    page = Page(console)
    console.print(
        Text(f"{escape_line(str(found.model['file']))} ({found.model['architecture']}), {_tokens(found)}", "bold")
    )
    if found.prompt is not None:
        console.print(Text(page.quote(found.prompt, 60)))
    console.print(Text(f"{escape_line(str(found.baseline.get('version', 'llama.cpp')))}\n"))
    console.print(Text(_FORM.format(*_HEAD).rstrip()))
    for row in found.rows:
        console.print(Text(_line(row), page.style_of(row.verdict) if row.verdict == WRONG else ""))
    console.print(Text(f"\n{_LEGEND}\n"))
    for row in found.rows:
        if said := _note(row):
            page.paragraph(f"{row.name}: ", said)
        for number, step in enumerate(row.steps, 1):
            page.paragraph(f"{number:3}  ", step)
    console.print(Text(_said(found)))
    if line := _next(found, run):
        page.print_unbroken(line)


def _note(row: Variant) -> str:
    """What has no room in a line of the table."""
    if row.wrong or row.counted:
        return escape_line(row.headline)
    if row.failed and row.steps:
        return escape_line(row.failed)
    return _failure(row) if row.failed and len(_failure(row)) > _REST else ""


def _tokens(found: Variants) -> str:
    count = len(found.tokens)
    return "1 token" if count == 1 else f"{count} tokens"


def _line(row: Variant) -> str:
    name = row.name if len(row.name) <= _NAME else f"{row.name[:8]}...{row.name[11 - _NAME :]}"  # both ends tell it
    if row.failed:
        return f"{name:{_NAME}} {_cut(_failure(row), _REST)}"
    if row.counted:
        return _cut(f"{name:{_NAME}} {row.verdict.upper():5}  {row.counted:40} {row.seconds:7.1f}", WIDTH)
    ratio = "" if row.ratio is None or not math.isfinite(row.ratio) else f"{row.ratio:.1f}x"
    leaves = _cut(row.leaves, 16) if row.leaves else ""
    wrong = f"{len(row.wrong)}" if row.judged else "-"
    return _FORM.format(name, wrong, leaves, ratio, _kl(row), _first(row), f"{row.seconds:.1f}").rstrip()


def _failure(row: Variant) -> str:
    """What became of it, in a few words: ``died of SIGSEGV in 0.4 s``, or llama.cpp's own."""
    said = escape_line(row.failed.partition(";")[0])
    if said.startswith("llama.cpp died of "):
        return f"{said.removeprefix('llama.cpp ').partition(':')[0]} in {row.seconds:.1f} s"
    quoted = _QUOTED.search(said)
    return f"refused: {quoted[1]}" if quoted else said.removeprefix("llama.cpp ")


def _kl(row: Variant) -> str:
    if row.logits is None or row.name == DEFAULT or math.isnan(row.logits.kl):
        return ""
    return "0" if row.logits.kl == 0 else f"{row.logits.kl:.0e}"


def _first(row: Variant) -> str:
    """The first token, where it is the default's or another."""
    logits = row.logits
    if logits is None or not logits.candidate_top:
        return ""
    if row.name != DEFAULT and logits.top1_agree:
        return "same"
    token = logits.candidate_top[0]
    return _cut(str(token.id) if token.text is None else escape_line(json.dumps(token.text, ensure_ascii=False)), 9)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def _said(found: Variants) -> str:
    wrong = [row for row in found.rows if row.verdict == WRONG]
    count = len(found.rows) - len(found.died) - len(found.refused)
    counted = f"{len(wrong)} of {count} variants are wrong" if wrong else "no variant is wrong"
    ended = f"; {len(found.died)} died: {', '.join(row.name for row in found.died)}" if found.died else ""
    names = f": {', '.join(row.name for row in found.refused)}" * found.asked
    refused = f"; {len(found.refused)} refused{names}" if found.refused else ""
    return f"{found.verdict.upper()}  {counted}{ended}{refused}"


def _next(found: Variants, run: Sequence[str]) -> str:
    """The command that shows one in full, the first that is wrong; empty where none was judged."""
    opened = [row for row in found.rows if not row.failed and row.comparison is not None and row.name != DEFAULT]
    row = next((row for row in opened if row.verdict == WRONG), next(iter(opened), None))
    if row is None:
        return ""
    words = ("--llama-cpp", row.name) if row.by_nodes else ("--candidate", _candidate(row))
    line = command_line(("llamadiff", "backend" if row.by_nodes else "compare", *run, *words))
    return f"next   one in full: {line}" if line is not None else ""


def as_json(found: Variants) -> str:
    """Everything, machine-readable."""
    about: dict[str, Any] = {
        "schema": SCHEMA, "verdict": found.verdict, "model": found.model,
        "tokens": [{"id": token, "text": text} for token, text in found.tokens],
        "prompt": found.prompt, "baseline": found.baseline, "variants": [_row(row) for row in found.rows],
    }  # fmt: skip
    return in_json(about)


def _row(row: Variant) -> dict[str, Any]:
    logits = row.logits
    top = logits.candidate_top[0] if logits is not None and logits.candidate_top else None
    return {
        "variant": row.name, "candidate": None if row.name == DEFAULT else _candidate(row), "verdict": row.verdict,
        "seconds": row.seconds, "judged": row.judged, "wrong": row.wrong, "headline": row.headline or None,
        "leaves": row.leaves, "ratio_to_noise": row.ratio,
        "kl": logits.kl if logits is not None else None,
        "top1_agree": logits.top1_agree if logits is not None else None,
        "first": None if top is None else {"id": top.id, "text": top.text}, "failed": row.failed or None,
        "died": row.died,
        **({"steps": row.steps} if row.steps else {}),
        **({"drafted": row.drafted, "accepted": row.accepted} if row.counted else {}),
    }  # fmt: skip


def _candidate(row: Variant) -> str:
    """What opens it in full, as a ``--candidate``."""
    return PREFIX + row.name
