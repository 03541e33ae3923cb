"""The one sentence, and what to do next: a Comparison's facts in words. Computes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llamadiff import limits, unjudged
from llamadiff.comparison import Row
from llamadiff.coverage import Coverage
from llamadiff.diagnose import words
from llamadiff.diagnose.diagnosis import Diagnosis
from llamadiff.preflight import WEIGHTS, Check
from llamadiff.stated import CHECK as STATISTICS

if TYPE_CHECKING:
    from llamadiff.manner import Manner

_OPS = {
    "GET_ROWS": "row lookup", "RMS_NORM": "RMSNorm", "NORM": "LayerNorm", "MUL_MAT": "matrix product",
    "MUL_MAT_ID": "expert product", "ROPE": "RoPE", "SOFT_MAX": "softmax", "ADD": "addition", "SWIGLU": "SwiGLU",
    "ARGSORT": "top-k", "DIV": "division", "SET_ROWS": "cache",
}  # fmt: skip

_WORDS = {"kq": "attention scores", "kqv_out": "weighted sum of values"}


def summarize(
    verdict: str,
    rows: Sequence[Row],
    candidate: Mapping[str, Any],
    baseline: Mapping[str, Any],
    is_engine: bool,
    unread: Sequence[str] = (),
    checks: Sequence[Check] = (),
    n_prefill: int = 0,
    missing: Sequence[str] = (),
    diagnosis: Sequence[Diagnosis] = (),
    coverage: Coverage | None = None,
    manner: Manner | None = None,
    notes: Sequence[str] = (),
) -> str:
    """One sentence: which op is wrong since which layer, or that none is and how much noise there is.

    ``unread`` are tensors of the file that the baseline's graph does not use and the engine does;
    ``diagnosis`` says why taps are wrong, or noise; ``coverage`` how much was judged;
    ``manner`` what is the candidate's own; ``notes`` how it was read.
    """
    weights = [check for check in checks if check.name.startswith(WEIGHTS)]
    stated = [check.found for check in checks if check.name == STATISTICS]
    if stated and not rows:
        text = stated.pop()
    elif weights and not rows:
        text = _weights_alone(str(candidate.get("name") or "the candidate"), weights)
    else:
        text = _judgement(verdict, rows, candidate, baseline, is_engine, bool(missing), diagnosis, coverage, manner)
    failed = [check for check in checks if check.verdict == limits.WRONG]
    if failed:
        more = f" (and {_counted(len(failed) - 1, 'more check')} {'fails' if len(failed) == 2 else 'fail'})"
        text = f"before any layer, {failed[0].name}: {failed[0].found}{more if len(failed) > 1 else ''}; {text}"
    decode = _decode_steps(rows, n_prefill)
    text += f"; {decode}" if decode else ""
    if unread:
        more = f" and {len(unread) - 1} more of the file's tensors" if len(unread) > 1 else ""
        text += f"; {baseline.get('name')} does not read {unread[0]}{more}, which the engine uses"
    unsure = "".join(f"; {c.name} could not be checked: {c.found}" for c in checks
                     if c.verdict == limits.UNCHECKED and c.name != STATISTICS)  # fmt: skip
    unsure += "".join(f"; {what}" for what in (*stated, *notes))
    return text + unsure + (unjudged.ignored(coverage, len(rows)) if coverage is not None else "")


def _weights_alone(whose: str, weights: Sequence[Check]) -> str:
    """What is said where weights are all that there is to judge."""
    right, count = sum(check.verdict == limits.MATCH for check in weights), len(weights)
    if count == 1:
        part = "the one weight" if right else "not even the one weight"
    elif right == count:
        part = "both weights" if count == 2 else f"all {count} weights"
    else:
        part = f"{right or 'none'} of the {count} weights"
    return f"{part} that {whose} dumped {'is' if min(right, count) <= 1 else 'are'} the file's, and it recorded no tap"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}"


def _decode_steps(rows: Sequence[Row], n_prefill: int) -> str | None:
    """Whether the first wrong tap is wrong in decode steps alone, and since which."""
    first = next((row.local for row in rows if _is_wrong(row.local)), None)
    if first is None or not 0 < n_prefill < len(first.per_token):
        return None
    wrong = [i for i, error in enumerate(first.per_token) if error > first.noise_limit]
    if not wrong or wrong[0] < n_prefill:
        return None
    step = wrong[0] - n_prefill
    return f"the prefill is right, the {'first' if step == 0 else f'{step + 1}.'} decode step is wrong"


def _judgement(
    verdict: str,
    rows: Sequence[Row],
    candidate: Mapping[str, Any],
    baseline: Mapping[str, Any],
    is_engine: bool,
    gaps: bool,
    diagnosis: Sequence[Diagnosis],
    coverage: Coverage | None,
    manner: Manner | None,
) -> str:
    whose = str(baseline.get("name")) if is_engine else str(candidate.get("name") or "the candidate")
    blamed = [] if is_engine else [row for row in rows if _is_wrong(row.baseline_local)]
    wrong = [row for row in rows if row.verdict == limits.WRONG]
    if wrong:
        text = _wrong(whose, wrong, rows, gaps, [d for d in diagnosis if not d.harmless])
        return text + (f"; {_also_baseline(blamed, baseline)}" if blamed else "")
    if any(unjudged.has_open_places(row) for row in rows):
        text = unjudged.unjudgeable(whose, str(baseline.get("name")), rows)
        return text + (f"; {_also_baseline(blamed, baseline)}" if blamed else "")
    if blamed:
        return f"{_right(whose, rows, gaps)}, and {_also_baseline(blamed, baseline)}"
    if verdict == limits.UNCHECKED or not rows:
        return _unchecked(whose, rows, gaps, coverage)
    ways = [f"it {words.clause(d)}" for d in diagnosis if d.harmless][:2]
    own = manner.clauses() if manner is not None else ()
    return "; ".join((_right(whose, rows, gaps), *own, *ways, *_hidden(rows), _drift(rows, is_engine)))


def _hidden(rows: Sequence[Row]) -> Iterator[str]:
    """How large a mistake the noise could hide, where there is any."""
    noisy = [row for row in rows if row.verdict == limits.NOISE and row.local is not None]
    if noisy:
        worst = max(noisy, key=lambda row: row.local.hides if row.local else 0.0)
        assert worst.local is not None
        yield f"a mistake below an NMSE of {worst.local.hides:.0e} could hide in it (at {worst.tap})"


def _is_wrong(local: Any) -> bool:
    return local is not None and local.verdict == limits.WRONG


def _also_baseline(blamed: Sequence[Row], baseline: Mapping[str, Any]) -> str:
    return f"it is {baseline.get('name')} whose {blamed[0].tap} is off on its own inputs"


def _right(whose: str, rows: Sequence[Row], gaps: bool) -> str:
    judged = [row for row in rows if row.local is not None]
    noisy = sum(row.verdict == limits.NOISE for row in rows)
    quality = _quality(rows) + (f" ({noisy} of {len(rows)} taps are noise)" if noisy else "")
    subject = f"what was recorded of {whose}" if gaps else f"every op of {whose}"
    return f"{subject} is {quality} on the inputs it was given ({len(judged)} taps, {_worst(judged)})"


def _worst(judged: Sequence[Row]) -> str:
    """The largest local error, and where."""
    worst = max(judged, key=lambda row: row.local.nmse if row.local else 0.0)
    assert worst.local is not None
    return f"worst local NMSE {worst.local.nmse:.1e} at {worst.tap}"


def _right_so_far(whose: str, rows: Sequence[Row], coverage: Coverage) -> str:
    """That what was judged is right, and that it is not enough."""
    judged = [row for row in rows if row.local is not None]
    part = f"{coverage.judged} of {coverage.taps} taps ({_worst(judged)})"
    return f"{whose} is {_quality(judged)} as far as it was recorded: {part}; {unjudged.lacking(rows, coverage)}"


def _drift(rows: Sequence[Row], is_engine: bool) -> str:
    last = rows[-1]
    if last.drift is None or last.ratio_to_noise is None:
        return "there is nothing to measure drift against"
    against = "exact arithmetic" if is_engine else "the baseline"
    if last.local is not None and len(last.drift.per_token) < len(last.local.per_token):
        against += f" over the first {len(last.drift.per_token)} tokens"
    if not math.isfinite(last.drift.nmse):
        return f"{last.tap} holds NaN or Inf on one side, so that there is no drift from {against}"
    noise = f"{last.ratio_to_noise:.1f}x" if last.ratio_to_noise < 100 else f"{last.ratio_to_noise:.0e}x"
    below = last.drift.nmse <= (last.expected_drift or 0.0)
    explained = "no more than" if below else f"{noise}"
    return f"{last.tap} drifts {last.drift.nmse:.1e} from {against}, {explained} what rounding in products explains"


def _wrong(whose: str, wrong: Sequence[Row], rows: Sequence[Row], gaps: bool, diagnosis: Sequence[Diagnosis]) -> str:
    first = wrong[0]
    assert first.local is not None
    rest = unjudged.other_origins(wrong[1:]) + unjudged.open_rest(rows) + _the_rest(rows, gaps)
    why = next((d for d in diagnosis if first.tap in d.taps), None)
    if why is not None and why.known:
        others = _other_causes([d for d in diagnosis if d is not why], rows)
        return f"{first.tap}: {_possessive(whose)} {_place(first)} {_known(why, rows)}{others}{rest}"
    local = first.local
    size = f"local NMSE {local.nmse:.1e}, limit {local.limit:.0e}"
    if local.not_finite:
        size = unjudged.where_not_finite(local)
    unknown = f", and {words.nearest(why).split(';')[0]}" if why is not None and not first.span else ""
    unnamed = [row for row in wrong if not any(d.known and row.tap in d.taps for d in diagnosis)]
    also = _others(unnamed) + _other_causes([d for d in diagnosis if d.known], rows) + rest
    place = f"{first.tap}: {_possessive(whose)} {_place(first)}"
    return f"{place} is wrong on the inputs it was given ({size}){unknown}{also}"


def _known(why: Diagnosis, rows: Sequence[Row]) -> str:
    """What a diagnosed op does, where, and the proof."""
    where = words.where(why, [row.tap for row in rows])
    return f"{words.clause(why)} ({f'{where}; ' if where else ''}{words.proof(why)})"


def explanation(d: Diagnosis, rows: Sequence[Row]) -> str:
    """A diagnosis as a sentence of its own."""
    row = next(row for row in rows if row.tap == d.tap)
    return f"{_place(row)} {words.clause(d)}" if d.known else f"{_place(row)}: {words.nearest(d)}"


def _other_causes(diagnosis: Sequence[Diagnosis], rows: Sequence[Row]) -> str:
    """The causes of the other WRONG taps: the known ones in their words."""
    known, unknown = [d for d in diagnosis if d.known], [d for d in diagnosis if not d.known]
    text = ""
    for d in known[:3]:
        row = next(row for row in rows if row.tap == d.tap)
        text += f"; {d.tap}: {_place(row)} {_known(d, rows)}"
    if len(known) > 3:
        text += f"; {len(known) - 3} more causes are listed below"
    if unknown:
        verb = "is" if len(unknown) == 1 else "are"
        text += f"; {', '.join(d.tap for d in unknown[:4])} {verb} wrong too, for reasons unknown"
    return text


def _possessive(name: str) -> str:
    return f"{name}'" if name.endswith("s") else f"{name}'s"


def _place(row: Row) -> str:
    op = _WORDS.get(row.tap.rsplit("-", 1)[0]) or _OPS.get(row.op, row.op)
    weight = f" by {row.weight}" if row.weight else ""
    if row.span:
        return f"computation of {row.span[0]} to {row.tap} (the taps between were not recorded)"
    where = f" of layer {row.layer}" if row.layer is not None and not row.weight else ""
    return f"{op}{weight}{where}"


def _others(wrong: Sequence[Row]) -> str:
    """The rest of the WRONG taps: the same op in other layers, then other ops."""
    first, rest = wrong[0], wrong[1:]
    if not rest:
        return ""
    word = first.tap.rsplit("-", 1)[0]
    same = [row for row in rest if row.tap.rsplit("-", 1)[0] == word]
    others = list(dict.fromkeys(row.tap.rsplit("-", 1)[0] for row in rest if row not in same))
    parts = []
    if same:
        parts.append(f"and in {words.layers_of([row.layer for row in same if row.layer is not None])}")
    if others:
        more = " and others" if len(others) > 4 else ""
        parts.append(f"{', '.join(others[:4])}{more} {'is' if len(others) == 1 else 'are'} wrong too")
    return "; " + ", ".join(parts)


def _the_rest(rows: Sequence[Row], gaps: bool) -> str:
    """What may be said of the other ops: only what was judged."""
    right = sum(row.verdict in (limits.MATCH, limits.NOISE) for row in rows)
    if not right:
        return ""
    if not gaps and not any(unjudged.has_open_places(row) for row in rows):
        return f"; every other op is {_quality(rows)}"
    others = f"the other {right} recorded taps are" if right > 1 else "the other recorded tap is"
    return f"; {others} {_quality(rows)}"


def _quality(rows: Sequence[Row]) -> str:
    """How right those are that are not wrong."""
    return "right up to rounding" if any(row.verdict == limits.NOISE for row in rows) else "right"


def _unchecked(whose: str, rows: Sequence[Row], gaps: bool, coverage: Coverage | None) -> str:
    if not rows:
        return f"nothing could be judged: {whose} recorded no tap of this model"
    differing = [row for row in rows if row.verdict == limits.UNCHECKED]
    if differing and differing[0].local is not None and differing[0].local.unclear:
        return unjudged.unclear(whose, differing)
    if differing:
        first = differing[0]
        sound = first.candidate is None or not (first.candidate.nan or first.candidate.inf)
        which = "that differ" if sound else "that differ, or hold NaN or Inf,"
        return f"{first.tap} is the first of {len(differing)} taps {which}; give --model to learn which op is wrong"
    if coverage is not None and not coverage.is_enough:
        return _right_so_far(whose, rows, coverage)
    return _right(whose, rows, gaps)


def next_steps(
    verdict: str,
    rows: Sequence[Row],
    missing: Sequence[str],
    is_engine: bool,
    diagnosis: Sequence[Diagnosis] = (),
    has_graph: bool = False,
    coverage: Coverage | None = None,
    between: Sequence[str] = (),
) -> tuple[str, ...]:
    """What a reader should do now.

    ``missing`` are taps that were not recorded; ``has_graph``: llama.cpp's graph could judge instead; ``between``: the
    taps of which statistics say that one is wrong.
    """
    if between and not any(row.verdict == limits.WRONG for row in rows):
        return (f"{_narrow_down(between)}; as whole tensors (llamadiff writer LANGUAGE), not as statistics",)
    first = next((row for row in rows if row.verdict == limits.WRONG), None)
    if first is None:
        lacking = unjudged.steps_when_lacking(coverage) if coverage is not None else ()
        gaps = (*lacking, *unjudged.step_when_unjudgeable(rows))
        return gaps if rows and gaps else (*gaps, *_steps_when_right(verdict, rows, missing))
    assert first.local is not None
    known = [d for d in diagnosis if d.known and not d.harmless]
    steps = [f"{d.tap}: {words.fix(d)}" for d in known[:4]]
    if not any(first.tap in d.taps for d in known):
        steps.append(_narrow_down(_still_open(first, rows)) if first.span else _advice(first))
        if first.span and not any(first.tap in d.taps for d in diagnosis):
            steps.append("or run it with --explain-output: it replays every known bug through these taps")
        if has_graph and not first.span:
            steps.append("or compare with --engine graph: there more bugs are known, of caps, windows, sinks and scans")
    place = ", ".join(map(str, first.local.index))
    steps.append(
        f"worst value {first.tap}[{place}]: expected {first.local.expected:.6g} from the inputs recorded, "
        f"found {first.local.recorded:.6g}"
    )
    if is_engine:
        steps.append(
            "run llamadiff doctor: it says how this llama.cpp was built, and whether its settings are known to be bad"
        )
    return tuple(steps)


def _still_open(row: Row, rows: Sequence[Row]) -> Sequence[str]:
    """The unrecorded taps before a wrong one, from the last on of which something was recorded, and that right."""
    right = {other.tap for other in rows if other.verdict in (limits.MATCH, limits.NOISE)}
    last = max((i for i, name in enumerate(row.span) if name in right), default=-1)
    return row.span[last + 1 :] or (row.span[last], row.tap)


def _narrow_down(span: Sequence[str]) -> str:
    """Which taps to write next: a layer's outputs while the layer is unknown, then the ops of the layer."""
    outputs = [name for name in span if name.startswith("l_out-")]
    if outputs:
        return f"write {outputs[0]} to {outputs[-1]} next: they say which layer is wrong" if len(outputs) > 1 else (
            f"write {outputs[0]} next: it says on which side of it the fault is")  # fmt: skip
    more = f" and {len(span) - 8} more" if len(span) > 8 else ""
    return f"write {', '.join(span[:8])}{more} next: one of these ops is the wrong one"


def _advice(row: Row) -> str:
    return {
        "ROPE": "check what is rotated, pairs (2i, 2i+1) or halves (i, i+n/2), and the base, scaling and positions",
        "RMS_NORM": "check epsilon (inside the root), the weight, and that the mean is not subtracted",
        "NORM": "check epsilon (inside the root), the weight and the bias, and that the mean is subtracted",
        "SOFT_MAX": "check the scale 1/sqrt(head size), the causal mask, and the axis",
        "ADD": "check that both terms are there: the branch and the residual from before the norm",
        "SWIGLU": "check silu(gate) * up: which is gate, and which activation",
        "GET_ROWS": "check the rows that your embedding reads: token id, row size, type",
    }.get(row.op) or _product_advice(row)


def _product_advice(row: Row) -> str:
    word = row.tap.rsplit("-", 1)[0]
    if word == "kq":
        return "check which K head each Q head reads (h reads h // group), and that scores have no scale or mask yet"
    if word == "kqv_out":
        return "check which V head each head reads, and how heads are merged"
    kind = f" ({row.weight_type})" if row.weight_type else ""
    return f"check {row.weight}{kind}: the right tensor, its orientation, its dequantization, and the bias"


def _steps_when_right(verdict: str, rows: Sequence[Row], missing: Sequence[str]) -> tuple[str, ...]:
    if verdict == limits.UNCHECKED or not rows:
        return ("record more taps; llamadiff taps MODEL lists them with their shapes",)
    judged = [row.local.nmse for row in rows if row.local is not None]
    steps = [f"the smallest tolerance that still passes: match = {max(judged):.1e}"] if judged else []
    if missing and len(missing) > len(rows):
        steps.append(f"{len(missing)} taps were not recorded; {_narrow_down(missing)}")
    return (
        *steps,
        "if the text is still wrong, look at what comes after the logits: sampling, detokenization, the prompt",
    )
