"""Comparison -> a terminal: the sentence first, its evidence under it. Computes nothing; it formats and lays out."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from typing import IO, Any

from rich.console import Console
from rich.text import Text

from llamadiff.comparison import diagnosis_text as say
from llamadiff.comparison import summary
from llamadiff.comparison.logits import Logits, TopToken
from llamadiff.comparison.result import Comparison
from llamadiff.diagnose.diagnosis import UNKNOWN, Diagnosis
from llamadiff.engines.reference_model import ENGINE
from llamadiff.engines.select import NUMPY, EngineUsed
from llamadiff.numerics import tolerances
from llamadiff.report.terminal.columns import Column, table
from llamadiff.report.terminal.escape import number, tiny
from llamadiff.report.terminal.footnotes import put_notes
from llamadiff.report.terminal.page import VERDICTS, Page
from llamadiff.report.terminal.tap_table import put_taps
from llamadiff.report.terminal.tokens import put_tokens

PIPED_WIDTH = 120
_FEW_CHECKS = 5
_FEW_CAUSES = 6

# Settings worth a word, and the value of each that is not.
_USUAL = {
    "type_k": ("F32", "K cache {}"),
    "type_v": ("F32", "V cache {}"),
    "flash_attn": ("False", "flash attention"),
    "repack": ("False", "repacked weights"),
    "gpu_layers": ("0", "{} layers on the GPU"),
}


def make_console(file: IO[str] | None = None, width: int | None = None) -> Console:
    """A console that obeys no markup; where it is no terminal, 120 cells wide unless COLUMNS says otherwise."""
    file = file if file is not None else sys.stdout
    console = Console(file=file, width=width, markup=False, emoji=False, highlight=False)
    if width is None and not console.is_terminal:
        columns = os.environ.get("COLUMNS", "")
        console.width = int(columns) if columns.isdecimal() and int(columns) > 0 else PIPED_WIDTH
    return console


def render_causes(comparison: Comparison, console: Console) -> None:
    """Print the sentence, the causes and what to do."""
    page = Page(console)
    _put_sentence(page, comparison)
    _put_profile(page, comparison)
    _put_causes(page, comparison)
    _put_next_steps(page, comparison)
    _put_timing(page, comparison)


def _put_sentence(page: Page, comparison: Comparison) -> None:
    label = Text.assemble((comparison.verdict.upper(), f"bold {VERDICTS[comparison.verdict]}"), "  ")
    page.paragraph(label, Text(page.data(comparison.summary, 4000), "bold"))


def render(comparison: Comparison, console: Console) -> None:
    """Print a comparison."""
    page = Page(console)
    _put_sentence(page, comparison)
    page.blank()
    _put_subject(page, comparison)
    if comparison.prompt is not None:
        page.paragraph(Text("prompt       ", "dim"), Text(page.quoted(comparison.prompt, 400)))
    put_tokens(page, comparison)
    _put_preflight(page, comparison)
    if comparison.rows:
        page.blank()
        put_taps(page, comparison)
        put_notes(page, comparison)
        page.blank()
        _put_three_way(page, comparison)
        _put_profile(page, comparison)
        _put_causes(page, comparison)
    if comparison.logits is not None:
        page.blank()
        _put_logits(page, comparison.logits, len(comparison.tokens))
    _put_absences(page, comparison)
    _put_next_steps(page, comparison)
    _put_timing(page, comparison)


def _put_subject(page: Page, comparison: Comparison) -> None:
    """The model, and who is compared with whom."""
    page.paragraph(Text("model        ", "dim"), _model(page, comparison.model))
    page.paragraph(Text("baseline  b  ", "dim"), _producer(page, comparison.baseline))
    page.paragraph(Text("candidate c  ", "dim"), _producer(page, comparison.candidate))
    if comparison.engine is not None and comparison.candidate.get("name") != ENGINE:
        page.paragraph(Text("engine       ", "dim"), Text(_engine(page, comparison.engine)))


def _engine(page: Page, engine: EngineUsed) -> str:
    """Who says what is right."""
    if engine.name == NUMPY:
        return f"{ENGINE}, in NumPy"
    because = f": {ENGINE} does not run this file ({page.data(engine.because, 300)})" if engine.because else ""
    return f"llama.cpp's graph, each node computed in NumPy{because}"


def _put_preflight(page: Page, comparison: Comparison) -> None:
    """What was looked at before the layers: the failures, and a count of the rest."""
    bad = [check for check in comparison.preflight if check.verdict != tolerances.MATCH]
    for check in bad[:_FEW_CHECKS]:
        line = Text.assemble((check.verdict.upper(), VERDICTS[check.verdict]), f"  {page.data(check.name, 60)}: ")
        page.paragraph(Text("preflight    ", "dim"), line + Text(page.data(check.found, 1000)))
    right = len(comparison.preflight) - len(bad)
    if right > 1 or len(bad) > _FEW_CHECKS:
        rest = f", {len(bad) - _FEW_CHECKS} more are not shown" if len(bad) > _FEW_CHECKS else ""
        page.paragraph(
            Text("preflight    ", "dim"), Text(f"{right} of {len(comparison.preflight)} checks are right{rest}")
        )


def _put_profile(page: Page, comparison: Comparison) -> None:
    """What the leading error looks like, and others that have no known cause."""
    first, known = comparison.leading, {tap for d in comparison.diagnosis if d.known for tap in d.taps}
    others = [row for row in comparison.wrong if row is not first and row.tap not in known]
    shown = [row for row in (first, *others) if row is not None and row.local is not None and row.local.facts]
    for row in shown[:_FEW_CAUSES]:
        assert row.local is not None
        page.blank()
        facts = "; ".join(page.data(fact.says, 400) for fact in row.local.facts)
        page.paragraph(Text("the error    ", "dim"), Text(f"in {page.data(row.tap)}: {facts}"))


def _put_causes(page: Page, comparison: Comparison) -> None:
    """Why taps are wrong: the known causes, each in a paragraph; all unknown ones in one line."""
    known = [d for d in comparison.diagnosis if d.known]
    for d in known[:_FEW_CAUSES]:
        _put_cause(page, comparison, d)
    if len(known) > _FEW_CAUSES:
        page.paragraph(Text("the cause    ", "dim"), Text(f"{len(known) - _FEW_CAUSES} more are in the JSON report"))
    unknown = [d for d in comparison.diagnosis if not d.known]
    if unknown:
        page.blank()
        taps = ", ".join(page.data(d.tap) for d in unknown[:_FEW_CAUSES])
        more = f" and {len(unknown) - _FEW_CAUSES} more" if len(unknown) > _FEW_CAUSES else ""
        said = Text.assemble((UNKNOWN, "bold"), f": {taps}{more}: {page.data(say.nearest(unknown[0]), 1000)}")
        page.paragraph(Text("the cause    ", "dim"), said)


def _put_cause(page: Page, comparison: Comparison, d: Diagnosis) -> None:
    """What an op does, where, the proof, and who had it before."""
    page.blank()
    label = "noise        " if d.harmless else "the cause    "
    said = page.data(summary.explanation(d, comparison.rows), 1000)
    page.paragraph(Text(label, "dim"), Text.assemble((page.data(say.names(d.causes), 120), "bold"), f": {said}"))
    where = say.where(d, [row.tap for row in comparison.rows])
    proof = f"{where}; {say.proof(d)}" if where else say.proof(d)
    page.paragraph(Text(" " * len(label)), Text(page.data(proof)))
    if d.causes[0].source:
        page.paragraph(Text(" " * len(label)), Text(page.data(f"known from {d.causes[0].source}"), "dim"))


def _model(page: Page, model: Mapping[str, Any]) -> Text:
    facts = [page.data(model["architecture"], 40)] if model.get("architecture") else []
    for key, words in (("layers", "{} layers"), ("embd", "embd {}"), ("heads", "{} heads"), ("kv_heads", "{} kv")):
        if model.get(key):
            facts.append(words.format(page.data(model[key], 20)))
    types = model.get("weight_types") or {}
    facts += [f"{page.data(count, 20)}×{page.data(kind, 20)}" for kind, count in types.items()]
    name = page.data(model["file"]) if model.get("file") else "not given"
    return Text.assemble((name, "bold"), f"  {', '.join(facts)}")


def _producer(page: Page, producer: Mapping[str, Any]) -> Text:
    facts = [page.data(producer["version"], 120)] if producer.get("version") else []
    settings = producer.get("settings")
    for key, (usual, words) in _USUAL.items():
        value = settings.get(key) if isinstance(settings, Mapping) else None
        if value is not None and str(value).upper() != usual.upper():
            facts.append(words.format(page.data(value, 20)))
    return Text.assemble((page.data(producer.get("name") or "unnamed", 60), "bold"), f"  {', '.join(facts)}")


def _put_three_way(page: Page, comparison: Comparison) -> None:
    """How far each side is from the engine, where both are traces; and what arithmetic the products have."""
    last = comparison.rows[-1]
    if len(last.distance) > 1:
        names = {"baseline": comparison.baseline.get("name"), "candidate": comparison.candidate.get("name")}
        facts = [f"{page.data(names[side] or side, 40)} {tiny(value)}" for side, value in last.distance.items()]
        page.paragraph(Text("to engine    ", "dim"), Text(f"{page.data(last.tap)}: {', '.join(facts)}"))
    used = [f"{page.data(kind)} by {page.data(to)}" for kind, to in comparison.arithmetics.items()]
    if used:
        page.paragraph(Text("products     ", "dim"), Text(f"weights by activations: {', '.join(used)}"))


def _put_logits(page: Page, logits: Logits, n_tokens: int) -> None:
    divergence = _divergence(logits)
    after = f"after {logits.after} of {n_tokens} tokens: " if 0 < logits.after < n_tokens else ""
    head = Text(f"{after}{divergence}; first token ")
    if logits.top1_agree is None:
        head.append("unknown", "bold red")
    else:
        agrees = logits.top1_agree
        head.append("agrees" if agrees else _disagreement(page, logits), "" if agrees else "bold red")
    margin = f", margin {number(logits.margin)}" if math.isfinite(logits.margin) else ""
    head.append(f"{margin}; {logits.agreeing}/{logits.rows} rows agree")
    page.paragraph(Text("logits       ", "dim"), head)
    for line in table(_logit_columns(page, logits), page.width - 2) if logits.top else ():
        page.put(Text("  ") + line)


def _divergence(logits: Logits) -> str:
    """KL, or why there is none."""
    if logits.not_finite:
        sides = " and ".join({"baseline": "b", "candidate": "c"}[side] for side in logits.not_finite)
        return f"no KL: the last row of {sides} holds NaN or Inf"
    return f"KL {tiny(logits.kl)} nats" if not logits.partial else "not all were recorded"


def _disagreement(page: Page, logits: Logits) -> str:
    sides = [
        f"{who} says {_token(page, top[0])}" for who, top in (("b", logits.top), ("c", logits.candidate_top)) if top
    ]
    return f"DIFFERS ({', '.join(sides)})" if sides else "DIFFERS"


def _token(page: Page, token: TopToken) -> str:
    return str(token.id) if token.text is None else f"{token.id} {page.quoted(token.text)}"


def _logit_columns(page: Page, logits: Logits) -> list[Column]:
    shown = {token.id for token in logits.top}
    top = (*logits.top, *(token for token in logits.expected if token.id not in shown))
    moved = ["bold yellow" if token.rank != token.candidate_rank else "" for token in top]
    return [
        Column("rank", [Text(str(token.rank)) for token in top]),
        Column("id", [Text(str(token.id)) for token in top]),
        Column("text", [Text("" if token.text is None else page.quoted(token.text)) for token in top], 2, left=True),
        Column("logit b", [Text(_logit(token.baseline)) for token in top], 1),
        Column("logit c", [Text(_logit(token.candidate)) for token in top], 1),
        Column(
            "rank c",
            [
                Text("-" if math.isnan(t.candidate) else str(t.candidate_rank), style)
                for t, style in zip(top, moved, strict=True)
            ],
            1,
        ),
    ]


def _logit(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.4f}" if abs(value) < 1e5 else number(value)


def _put_absences(page: Page, comparison: Comparison) -> None:
    """Weights that only one side read, and taps that were not recorded."""
    missing, baseline = comparison.missing, page.data(comparison.baseline.get("name") or "the baseline", 40)
    facts = [
        ("weights      ", f"only {baseline} reads ", comparison.only_baseline_read),
        ("weights      ", "only the reference engine reads ", comparison.only_engine_read),
        ("not recorded ", f"{len(missing)} taps: " if len(missing) > 1 else "", missing),
        ("ignored      ", "no tap of this model: ", comparison.extra),
        ("decoding     ", "ggml and gguf-py decode differently ", comparison.decoding.refused),
    ]
    if any(names for *_, names in facts):
        page.blank()
    for label, words, names in facts:
        if names:
            page.paragraph(Text(label, "dim"), Text(words + page.names(names)))


def _put_next_steps(page: Page, comparison: Comparison) -> None:
    if comparison.next_steps:
        page.blank()
        page.put(Text("What to do next", "bold"))
    for step in comparison.next_steps:
        page.paragraph(Text("  • "), Text(page.data(step, 4000)))


def _put_timing(page: Page, comparison: Comparison) -> None:
    timing, by_ggml = comparison.timing, comparison.decoding.by_ggml
    words = {"total_s": "{:.1f} s in all", "capture_s": "capture {:.1f} s", "engine_s": "engine {:.1f} s",
             "peak_rss_mb": "peak memory {:.0f} MiB"}  # fmt: skip
    facts = [form.format(timing[key]) for key, form in words.items() if key in timing]
    if by_ggml:
        facts.append(f"{by_ggml} tensors decoded by ggml, bit for bit as gguf-py does")
    if facts:
        page.blank()
        page.paragraph(Text(), Text(" · ".join(facts), "dim"))
