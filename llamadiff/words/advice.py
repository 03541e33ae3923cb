"""What to do next, in words: which fix, which op to look at, which taps to write. Computes nothing."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from llamadiff.judge.fact import ROUNDINGS
from llamadiff.judge.preflight.checks import RECORDING
from llamadiff.judge.verdict import UNCHECKED, WRONG, is_right
from llamadiff.result.comparison import Judged
from llamadiff.result.diagnosis import Diagnosis
from llamadiff.result.rows import Row, is_slight, leading_row, stem
from llamadiff.trace.taps import LOGITS
from llamadiff.words import diagnosis_text, unjudged

_ALONE = "each is judged by itself then"
_REPLAY = "or run it with --explain 600: it replays every known bug through these taps"
_FUSED = {"kq", "kq_soft_max", "kqv", "kqv_mla"}  # what a fused attention has no tensors of
_MOST_ASKED = 8  # taps that are all asked for; of more, those that halve them
_FEW = 3  # wrong ops without a known cause that advice is given for
_LOOK_AT = {
    "kq": "check which K head each Q head reads (h reads h // group), and that scores have no scale or mask yet",
    "kqv_out": "check which V head each head reads, and how heads are merged",
    "ROPE": "check what is rotated, pairs (2i, 2i+1) or halves (i, i+n/2), and the base, scaling and positions",
    "RMS_NORM": "check epsilon (inside the root), the weight, and that the mean is not subtracted",
    "NORM": "check epsilon (inside the root), the weight and the bias, and that the mean is subtracted",
    "SOFT_MAX": "check the scale, the mask (of a router: over which experts), and the axis",
    "ADD": "check that both terms are there, and that each is taken from its own place",
    "SWIGLU": "check silu(gate) * up: which is gate, and which activation",
    "GET_ROWS": "check the rows that are read: token id, row size, type",
}


def next_steps(verdict: str, judged: Judged, is_engine: bool, between: Sequence[str] = ()) -> tuple[str, ...]:
    """What a reader should do now; ``between``: the taps of which statistics say that one is wrong."""
    rows, diagnosis = judged.rows, judged.diagnosis
    wrong = [row for row in rows if row.verdict == WRONG]
    first = leading_row(wrong, diagnosis)
    if first is None and between:
        return (f"{_narrow_down(between, rows)}; as whole tensors (llamadiff writer LANGUAGE), not as statistics",)
    if first is None and judged.blamed:
        return (
            "compare the model without --candidate: that names what the baseline does there, and shows both values",
            "run llamadiff doctor: it says how this llama.cpp was built, and whether its settings are known to be bad",
        )
    if first is None and any(check.name == RECORDING for check in judged.preflight):
        return ("record each tap under the name of what it holds, and compare again",)
    if first is None:
        lacking = unjudged.steps_when_lacking(judged.coverage) if judged.coverage is not None else ()
        gaps = (*lacking, *unjudged.step_when_unjudgeable(rows, judged.origin), *_steps_when_unclear(rows))
        return gaps if rows and gaps else (*gaps, *_steps_when_right(verdict, rows, is_engine))
    known = [d for d in diagnosis if d.known and not d.harmless]
    steps = [fix_step(d) for d in known[:4]]
    if first.misrecorded:
        steps.append(f"look at what writes {first.tap}: its axes, and whether its memory was used again before")
    dark = leading_row([row for row in wrong if not any(row.tap in d.taps for d in known)], diagnosis)
    if dark is not None and not dark.misrecorded and (dark is first or not is_slight(dark, diagnosis)):
        look, *more = _steps_when_unknown(dark, rows, known, diagnosis)
        steps += [look if dark is first else f"{dark.tap}: {look}", *more]
    steps.append(place_step(first))
    if is_engine:
        steps.append(
            "run llamadiff doctor: it says how this llama.cpp was built, and whether its settings are known to be bad"
        )
    return tuple(steps)


def _steps_when_unclear(rows: Sequence[Row]) -> tuple[str, ...]:
    """What tells a mistake from rounding where a span is off by as much: what lies in it."""
    first = next((row for row in rows if row.span and row.local is not None and row.local.unclear), None)
    return () if first is None else (_narrow_down(_still_open(first, rows), rows, sure=False), _REPLAY)


def _steps_when_unknown(
    first: Row, rows: Sequence[Row], known: Sequence[Diagnosis], diagnosis: Sequence[Diagnosis]
) -> list[str]:
    """Where to look for a cause that is not known: at the leading op, and at others of another kind."""
    named = {tap for d in known for tap in d.taps}
    wrong = [row for row in rows if row.verdict == WRONG and not row.misrecorded]
    unnamed = [row for row in wrong if row.tap not in named]
    others = {stem(row.tap): row for row in reversed(unnamed) if stem(row.tap) != stem(first.tap)}
    others = {row.op: row for row in reversed(others.values()) if not row.span and row.op != first.op}
    facts = [(tap, fact.kind) for d in diagnosis for tap, facts in d.read.items() for fact in facts]
    read_back = {tap for tap, kind in facts if kind not in ROUNDINGS}
    steps = [_narrow_down(_still_open(first, rows), rows, first.tap) if first.span else advice(first, read_back)]
    if first.span and not any(first.tap in d.taps for d in diagnosis):
        steps.append(_REPLAY)
    if any(first.tap in d.taps and not d.by_graph for d in diagnosis):
        steps.append("or run it where llama.cpp runs this file: known bugs are looked for in its graph")
    return [*steps, *(f"{row.tap}: {advice(row, read_back)}" for row in list(others.values())[: _FEW - 1])]


def _still_open(row: Row, rows: Sequence[Row]) -> Sequence[str]:
    """The unrecorded taps before a wrong one, from the last on of which something was recorded, and that right."""
    right = {other.tap for other in rows if is_right(other.verdict)}
    last = max((i for i, name in enumerate(row.span) if name in right), default=-1)
    return row.span[last + 1 :] or (row.span[last],)


def fix_step(d: Diagnosis) -> str:
    """What to do about a known bug."""
    return f"{d.tap}: {diagnosis_text.fix(d)}"


def place_step(row: Row) -> str:
    """Where a wrong tap is most off, with both values."""
    assert row.local is not None
    place = ", ".join(map(str, row.local.index))
    recorded = "NaN" if math.isnan(row.local.recorded) else f"{row.local.recorded:.6g}"
    return f"{row.tap}[{place}] is {recorded}; on its inputs {row.local.expected:.6g} is right"


def _narrow_down(span: Sequence[str], rows: Sequence[Row], end: str | None = None, sure: bool = True) -> str:
    """Which taps to write next: a layer's outputs while the layer is unknown, then the ops of the layer.

    ``end`` is the tap that answers for them, and may be wrong itself; ``sure``: something is wrong. Scores are not
    asked of an engine that recorded none in any layer: a fused attention has no such tensors.
    """
    outputs = [name for name in span if name.startswith("l_out-")]
    if outputs:
        named, which = outputs[0], "it says on which side of it the fault is"
        if len(outputs) > 1:
            named, which = f"{outputs[0]} to {outputs[-1]}", "they say which layer is wrong"
        return f"write {named} next: {which if sure else _ALONE}"
    is_fused = not any(stem(row.tap) in _FUSED for row in rows)
    asked = [name for name in span if not (is_fused and stem(name) in _FUSED)]
    if not asked:
        return _within_attention(span[0].rsplit("-", 1)[-1], rows, end)
    which = f"one of these ops is wrong, or {end} itself" if end else "one of these ops is the wrong one"
    if len(asked) > _MOST_ASKED:
        asked, which = [asked[len(asked) * part // 5] for part in range(1, 5)], "they say between which the fault is"
    elif len(asked) < len(span):
        which = f"one of these ops is wrong, or attention between them{f', or {end} itself' if end else ''}"
    return f"write {', '.join(asked)} next: {which if sure else _ALONE}"


def _within_attention(layer: str, rows: Sequence[Row], end: str | None) -> str:
    """What is left to look at where a fused attention is wrong: the rows that it reads, then what it does with them."""
    read = [f"kv_k-{layer}", f"kv_v-{layer}"]
    missing = [name for name in read if name not in {row.tap for row in rows}]
    inside = f"a fused attention has no scores to write: check its scale, mask and heads, up to {end or 'its output'}"
    if not missing:
        return f"the rows that attention reads were recorded; {inside}"
    return f"write {' and '.join(missing)} next, the rows that attention reads; {inside}"


def advice(row: Row, read_back: Collection[str] = ()) -> str:
    """Where to look at an op that is wrong for no known cause: by its tap, or else its op, or else its weight; of taps
    that were ``read_back``, for what they did.
    """
    if row.tap in read_back:
        return f"look in the code that computes {row.tap} for what is said of it above"
    known = _LOOK_AT.get(stem(row.tap)) or _LOOK_AT.get(row.op)
    if known is not None or row.weight is None:
        return known or f"check what {row.tap} reads, and its op: {row.op.lower().replace('_', ' ')}"
    kind = f" ({row.weight_type})" if row.weight_type else ""
    return f"check {row.weight}{kind}: the right tensor, its orientation, its dequantization, and the bias"


def _steps_when_right(verdict: str, rows: Sequence[Row], is_engine: bool) -> tuple[str, ...]:
    """Where to look where nothing is wrong: of an engine whose logits were judged, behind them."""
    if verdict == UNCHECKED or not rows:
        return ("record more taps; llamadiff taps MODEL lists them with their shapes",)
    if is_engine or verdict == WRONG or not any(row.tap == LOGITS for row in rows):
        return ()
    return ("if the text is still wrong, look at what comes after the logits: sampling, detokenization, the prompt",)
