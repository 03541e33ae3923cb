"""What was compared, on a page: the model, both sides, the tokens, and what was found before the layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from llamadiff.engines.reference_model import ENGINE
from llamadiff.engines.select import NUMPY, EngineUsed
from llamadiff.judge.preflight.checks import RECORDING
from llamadiff.judge.verdict import MATCH, WRONG
from llamadiff.report.facts import model_facts, run_fact, side_facts
from llamadiff.report.terminal.page import LABEL, PROSE, Page
from llamadiff.result.comparison import Comparison

_FEW_CHECKS = 3


def put_subject(page: Page, comparison: Comparison, full: bool) -> None:
    """Print who was compared with whom, on what; in a full report every token."""
    told = full or _differ_in_version(comparison)
    sides = f"{_producer(page, comparison.baseline, told)} and {_producer(page, comparison.candidate, told)}"
    said = f"{_model(page, comparison.model, full)}: {sides}"
    run = "" if full else run_fact(comparison)
    said += f", {run}" if run else ""
    prompt = "" if comparison.prompt is None or full else f" {page.quote(comparison.prompt, 24)}"
    fits = LABEL + cell_len(said + prompt) <= min(page.width, PROSE)
    page.print_labelled("compared", said + (prompt if fits else ""))
    if prompt and not fits:
        page.print_labelled("prompt", page.quote(comparison.prompt or "", 60))
    if comparison.engine is not None and (comparison.engine.name != NUMPY or full):
        whose = "llama.cpp's" if comparison.tokens else "its own"  # a program's that was watched
        page.print_labelled("judged", f"by {_engine(page, comparison.engine, whose)}")
    if full and comparison.prompt is not None:
        page.print_labelled("prompt", page.quote(comparison.prompt, 400))
    if full:
        put_tokens(page, comparison)


def _differ_in_version(comparison: Comparison) -> bool:
    """Whether the sides are one program in two versions."""
    b, c = comparison.baseline, comparison.candidate
    return b.get("name") == c.get("name") and b.get("version") != c.get("version")


def _engine(page: Page, engine: EngineUsed, whose: str) -> str:
    """Who says what is right."""
    if engine.name == NUMPY:
        return f"{ENGINE}, in NumPy"
    because = f": {ENGINE} does not run this file ({page.data(engine.because, 300)})" if engine.because else ""
    return f"{whose} graph, each node computed in NumPy{because}"


def put_preflight(page: Page, comparison: Comparison, full: bool) -> None:
    """Print what failed before the layers, beyond what the headline says; in a full report, how much was right."""
    failed = [check for check in comparison.preflight if check.verdict == WRONG]
    said = (*failed[:1], *(check for check in comparison.preflight if check.name == RECORDING))
    bad = [check for check in comparison.preflight if check.verdict != MATCH and check not in said]
    for check in bad[: len(bad) if full else _FEW_CHECKS]:
        line = f"{check.verdict.upper()}  {page.data(check.name, 60)}: {page.data(check.found, 1000)}"
        page.print_labelled("before", line)
    if len(bad) > _FEW_CHECKS and not full:
        page.print_labelled("before", f"{len(bad) - _FEW_CHECKS} more checks: --full shows them")
    right = sum(check.verdict == MATCH for check in comparison.preflight)
    if right and full:
        page.print_labelled("before", f"{right} of {len(comparison.preflight)} checks passed")


def _model(page: Page, model: Mapping[str, Any], full: bool) -> str:
    facts = [page.data(fact, 40) for fact in model_facts(model, full)]
    name = page.data(model["file"]) if model.get("file") else "no model"
    return f"{name} ({', '.join(facts)})" if facts else name


def _producer(page: Page, producer: Mapping[str, Any], full: bool) -> str:
    facts = [page.data(fact, 120) for fact in side_facts(producer, full)]
    name = page.data(producer.get("name") or "unnamed", 60)
    return f"{name} ({', '.join(facts)})" if facts else name


MANY, HEAD, TAIL = 40, 24, 8


def put_tokens(page: Page, comparison: Comparison) -> None:
    """Print the tokens; of many, the first and the last."""
    tokens, n_prefill = comparison.tokens, comparison.n_prefill
    page.print_labelled("tokens", _count(len(tokens), n_prefill, comparison.batches))
    if not tokens:
        return
    split = HEAD if len(tokens) > MANY else len(tokens)
    parts = [range(split), range(len(tokens) - TAIL, len(tokens))] if len(tokens) > MANY else [range(split)]
    digits = max(len(str(tokens[number][0])) for part in parts for number in part)
    cells = {number: _cell(page, *tokens[number], digits, number == n_prefill) for part in parts for number in part}
    width = max(cell.cell_len for cell in cells.values())
    for part in parts:
        if part.start:
            page.put(f"       ... {part.start - split} tokens left out ...")
        for number in part:
            cells[number].pad_right(width + 1 - cells[number].cell_len)
        page.grid([f"{number:>5} " for number in part], [cells[number] for number in part], 1)


def _count(count: int, n_prefill: int, batches: Sequence[int]) -> str:
    parts = sum(end <= n_prefill for end in accumulate(batches))
    how = f"in {parts} batches" if parts > 1 else "in one prefill"
    if not 0 < n_prefill < count:
        return f"{count}, {how}"
    return f"{count}: the first {n_prefill} {how}, decode steps from ▸ on"


def _cell(page: Page, token: int, text: str | None, digits: int, first_decoded: bool) -> Text:
    words = "" if text is None else f":{page.quote(text)}"
    return Text.assemble("▸" if first_decoded else " ", f"{token:>{digits}}", words)
