"""What was compared, on a page: the model, both sides, the tokens, and what was found before the layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from llamadiff.comparison.result import Comparison
from llamadiff.engines.reference_model import ENGINE
from llamadiff.engines.select import NUMPY, EngineUsed
from llamadiff.numerics import tolerances
from llamadiff.report.terminal.finding import LABEL, labelled
from llamadiff.report.terminal.page import PROSE, Page
from llamadiff.report.terminal.tokens import put_tokens

_FEW_CHECKS = 3

# Settings worth a word, and the value of each that is not.
_USUAL = {
    "type_k": ("F32", "K cache {}"),
    "type_v": ("F32", "V cache {}"),
    "flash_attn": ("False", "flash attention"),
    "repack": ("False", "repacked weights"),
    "gpu_layers": ("0", "{} layers on the GPU"),
    "device": ("", "layers on {}"),
}


def put_subject(page: Page, comparison: Comparison, full: bool) -> None:
    """Print who was compared with whom, on what; in a full report every token."""
    told = full or _differ_in_version(comparison)
    sides = f"{_producer(page, comparison.baseline, told)} and {_producer(page, comparison.candidate, told)}"
    said = f"{_model(page, comparison.model, full)}: {sides}"
    said += "" if full else f", {_run(comparison)}"
    prompt = "" if comparison.prompt is None or full else f" {page.quoted(comparison.prompt, 24)}"
    fits = LABEL + cell_len(said + prompt) <= min(page.width, PROSE)
    page.paragraph(labelled("compared"), Text(said + (prompt if fits else "")))
    if comparison.engine is not None and (comparison.engine.name != NUMPY or full):
        page.paragraph(labelled("judged"), Text(f"by {_engine(page, comparison.engine)}"))
    if full and comparison.prompt is not None:
        page.paragraph(labelled("prompt"), Text(page.quoted(comparison.prompt, 400)))
    if full:
        put_tokens(page, comparison)


def _differ_in_version(comparison: Comparison) -> bool:
    """Whether the sides are one program in two versions."""
    b, c = comparison.baseline, comparison.candidate
    return b.get("name") == c.get("name") and b.get("version") != c.get("version")


def _run(comparison: Comparison) -> str:
    """How many tokens there were."""
    count, n_prefill = len(comparison.tokens), comparison.n_prefill
    decoded = count - n_prefill if 0 < n_prefill < count else 0
    steps = f" and {decoded} decode step{'s' if decoded > 1 else ''}" if decoded else ""
    prefill = count - decoded
    return f"{prefill} token{'s' if prefill != 1 else ''}{steps}"


def _engine(page: Page, engine: EngineUsed) -> str:
    """Who says what is right."""
    if engine.name == NUMPY:
        return f"{ENGINE}, in NumPy"
    because = f": {ENGINE} does not run this file ({page.data(engine.because, 300)})" if engine.because else ""
    return f"llama.cpp's graph, each node computed in NumPy{because}"


def put_preflight(page: Page, comparison: Comparison, full: bool) -> None:
    """Print what failed before the layers, beyond what the headline says; in a full report, how much was right."""
    failed = [check for check in comparison.preflight if check.verdict == tolerances.WRONG]
    bad = [check for check in comparison.preflight if check.verdict != tolerances.MATCH and check not in failed[:1]]
    for check in bad[: len(bad) if full else _FEW_CHECKS]:
        line = f"{check.verdict.upper()}  {page.data(check.name, 60)}: {page.data(check.found, 1000)}"
        page.paragraph(labelled("before"), Text(line))
    if len(bad) > _FEW_CHECKS and not full:
        page.paragraph(labelled("before"), Text(f"{len(bad) - _FEW_CHECKS} more checks: --full shows them"))
    right = sum(check.verdict == tolerances.MATCH for check in comparison.preflight)
    if right and full:
        page.paragraph(labelled("before"), Text(f"{right} of {len(comparison.preflight)} checks passed"))


def _model(page: Page, model: Mapping[str, Any], full: bool) -> str:
    facts = [page.data(model["architecture"], 40)] if model.get("architecture") else []
    if model.get("layers"):
        facts.append(f"{page.data(model['layers'], 20)} layer{'' if model['layers'] == 1 else 's'}")
    for key, words in (("embd", "embd {}"), ("heads", "{} heads"), ("kv_heads", "{} kv")):
        if full and model.get(key):
            facts.append(words.format(page.data(model[key], 20)))
    types = model.get("weight_types") or {}
    facts += [f"{page.data(count, 20)} {page.data(kind, 20)}" if full else page.data(kind, 20)
              for kind, count in types.items() if full or kind != "F32" or len(types) == 1]  # fmt: skip
    name = page.data(model["file"]) if model.get("file") else "no model"
    return f"{name} ({', '.join(facts)})" if facts else name


def _producer(page: Page, producer: Mapping[str, Any], full: bool) -> str:
    facts = [page.data(producer["version"], 120)] if producer.get("version") and full else []
    settings = producer.get("settings")
    for key, (usual, words) in _USUAL.items():
        value = settings.get(key) if isinstance(settings, Mapping) else None
        if value is not None and str(value).upper() != usual.upper():
            facts.append(words.format(page.data(value, 20)))
    name = page.data(producer.get("name") or "unnamed", 60)
    return f"{name} ({', '.join(facts)})" if facts else name
