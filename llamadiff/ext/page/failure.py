"""What a reader of CI needs of one run that failed: the fix, the evidence, what to run next; a few lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from llamadiff.judge.verdict import MATCH
from llamadiff.report.check_lines import in_words
from llamadiff.report.facts import mistakes
from llamadiff.report.formats import command_line
from llamadiff.report.terminal.tap_lines import own_error, times_limit
from llamadiff.result.comparison import Comparison
from llamadiff.words import diagnosis_text
from llamadiff.words.advice import place_step
from llamadiff.words.provenance import provenance
from llamadiff.words.repairs import repairs_of

FEW = 3  # fixes, and other steps where there are fewer
FLAGS = {"--partial", "--annotate", "--update", "--force"}  # options of check without a value
LEFT_OUT = ("-o", "--output")  # of a command that is run again for one trace


def lines_of_failure(path: Path, result: Comparison, command: Sequence[str]) -> Iterator[tuple[str, str]]:
    """A label and a text for each line, eight at most; ``command``: what was run."""
    repairs = repairs_of(result)
    fixes = [(d.tap, diagnosis_text.fix(d)) for d in mistakes(result)]
    for tap, fix in fixes[:FEW]:
        yield "fix", f"{tap}: {fix}" if len(repairs) > 1 else fix
    yield "evidence", "; ".join(_evidence(result))
    said = {f"{tap}: {fix}" for tap, fix in fixes} | set(_place(result))
    for step in [step for step in result.next_steps if step not in said][: max(1, FEW - len(fixes))]:
        yield "next", step
    if result.positions is not None:
        yield "logits", in_words(result.positions)
    line = command_line(_for_one(command, path))
    if line is not None:
        yield "run", line
    yield "capture", provenance(result)


def _evidence(result: Comparison) -> Iterator[str]:
    """The row of the tap that matters first, what proves the finding, and what was not right before any tap."""
    first = result.leading
    if first is not None and own_error(first):
        limit = times_limit(first)
        yield f"{first.tap} {first.verdict.upper()}: own error {own_error(first)}{f', {limit} its limit' * bool(limit)}"
    yield from _place(result)
    yield from result.proof
    yield from (f"{check.name}: {check.found}" for check in result.preflight if check.verdict != MATCH)


def _place(result: Comparison) -> Iterator[str]:
    """Where the first tap is most off, with both values."""
    if result.leading is not None and result.leading.local is not None:
        yield place_step(result.leading)


def _for_one(command: Sequence[str], path: Path) -> list[str]:
    """``check`` for one trace of many, with the options that it had, and a page that shows all; empty for others."""
    if command[1:2] != ("check",):
        return []
    kept, words = list[str](), list(command[2:])
    while words:
        word = words.pop(0)
        has_value = word.startswith("-") and "=" not in word and word not in FLAGS
        value = [words.pop(0)] if has_value and words else []
        if word.startswith("-") and word.partition("=")[0] not in LEFT_OUT:
            kept += [word, *value]
    return [*command[:2], str(path), *kept, "-o", f"{path.stem}.html"]
