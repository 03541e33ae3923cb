"""The one sentence, and what to do next: a Comparison's facts in words. Computes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from llamadiff.comparison import diagnosis_text, unjudged
from llamadiff.comparison.coverage import Coverage
from llamadiff.comparison.result import Judged, Sides
from llamadiff.comparison.rows import Row, is_slight, leading
from llamadiff.diagnose.diagnosis import Diagnosis
from llamadiff.judge.statistics import CHECK as STATISTICS
from llamadiff.numerics import tolerances
from llamadiff.preflight.checks import WEIGHTS, Check
from llamadiff.preflight.shapes import SHAPES

_OPS = {
    "GET_ROWS": "row lookup", "RMS_NORM": "RMSNorm", "NORM": "LayerNorm", "MUL_MAT": "matrix product",
    "MUL_MAT_ID": "expert product", "ROPE": "RoPE", "SOFT_MAX": "softmax", "ADD": "addition", "SWIGLU": "SwiGLU",
    "ARGSORT": "top-k", "DIV": "division", "SET_ROWS": "cache",
}  # fmt: skip

_FEW = 3  # wrong records that are told one by one
_WORDS = {"kq": "attention scores", "kqv_out": "weighted sum of values"}


def summarize(verdict: str, sides: Sides, judged: Judged) -> str:
    """One sentence: which op is wrong since which layer, or that none is and how much noise there is."""
    rows, checks, unread, coverage = judged.rows, judged.preflight, judged.only_engine_read, judged.coverage
    weights = [check for check in checks if check.name.startswith(WEIGHTS)]
    stated = [check.found for check in checks if check.name == STATISTICS]
    if not rows and any(check.name == SHAPES for check in checks):
        text = "nothing else could be judged"
    elif stated and not rows:
        text = stated.pop()
    elif weights and not rows:
        text = _weights_alone(_name(sides.candidate), weights)
    else:
        text = _judgement(verdict, sides, judged)
    failed = [check for check in checks if check.verdict == tolerances.WRONG]
    if failed:
        more = f" (and {_counted(len(failed) - 1, 'more check')} {'fails' if len(failed) == 2 else 'fail'})"
        text = f"before any layer, {failed[0].name}: {failed[0].found}{more if len(failed) > 1 else ''}; {text}"
    decode = _decode_steps(rows, sides)
    text += f"; {decode}" if decode else ""
    if unread:
        more = f" and {len(unread) - 1} more of the file's tensors" if len(unread) > 1 else ""
        text += f"; {sides.baseline.get('name')} does not read {unread[0]}{more}, which the engine uses"
    unsure = "".join(f"; {c.name} could not be checked: {c.found}" for c in checks
                     if c.verdict == tolerances.UNCHECKED and c.name != STATISTICS)  # fmt: skip
    unsure += "".join(f"; {what}" for what in (*stated, *judged.notes))
    return text + unsure + (unjudged.ignored(coverage, len(rows)) if coverage is not None else "")


def _weights_alone(whose: str, weights: Sequence[Check]) -> str:
    """What is said where weights are all that there is to judge."""
    right, count = sum(check.verdict == tolerances.MATCH for check in weights), len(weights)
    if count == 1:
        part = "the one weight" if right else "not even the one weight"
    elif right == count:
        part = "both weights" if count == 2 else f"all {count} weights"
    else:
        part = f"{right or 'none'} of the {count} weights"
    return f"{part} that {whose} dumped {'is' if min(right, count) <= 1 else 'are'} the file's, and it recorded no tap"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}"


def _decode_steps(rows: Sequence[Row], run: Sides) -> str | None:
    """Whether the first wrong tap is right in the first batch, and since which it is wrong."""
    first = next((row.local for row in rows if _is_wrong(row.local)), None)
    if first is None or len(run.batches) <= 1 or len(first.per_token) != len(run.tokens):
        return None
    wrong = next((i for i, error in enumerate(first.per_token) if error > first.noise_limit), 0)
    if wrong < run.batches[0]:
        return None
    if wrong >= run.n_prefill:
        step = wrong - run.n_prefill
        return f"the prefill is right, the {'first' if step == 0 else f'{step + 1}.'} decode step is wrong"
    number = sum(edge <= wrong for edge in (0, *accumulate(run.batches)))
    return f"the prompt's first batch is right, its {'second' if number == 2 else f'{number}.'} is wrong"


def _name(candidate: Mapping[str, Any]) -> str:
    return str(candidate.get("name") or "the candidate")


def _judgement(verdict: str, sides: Sides, judged: Judged) -> str:
    """What the taps say."""
    rows, diagnosis, gaps = judged.rows, judged.diagnosis, bool(judged.missing)
    baseline, is_engine = sides.baseline, sides.is_engine
    whose = str(baseline.get("name")) if is_engine else _name(sides.candidate)
    blamed = [] if is_engine else [row for row in rows if _is_wrong(row.baseline_local)]
    wrong = [row for row in rows if row.verdict == tolerances.WRONG]
    if wrong:
        text = _wrong(whose, wrong, rows, gaps, [d for d in diagnosis if not d.harmless])
        return text + (f"; {_also_baseline(blamed, baseline)}" if blamed else "")
    if any(unjudged.has_open_places(row) for row in rows):
        text = unjudged.unjudgeable(whose, str(baseline.get("name")), rows)
        return text + (f"; {_also_baseline(blamed, baseline)}" if blamed else "")
    if blamed:
        return f"{_right(whose, rows, gaps)}, and {_also_baseline(blamed, baseline)}"
    if verdict == tolerances.UNCHECKED or not rows:
        return unchecked(whose, rows, gaps, judged.coverage)
    ways = [f"it {diagnosis_text.clause(d)}" for d in diagnosis if d.harmless][:2]
    own = judged.manner.clauses() if judged.manner is not None else ()
    return "; ".join((_right(whose, rows, gaps), *own, *ways, *_hidden(rows), _drift(rows, is_engine)))


def _hidden(rows: Sequence[Row]) -> Iterator[str]:
    """How large a mistake the noise could hide, where there is any."""
    noisy = [row for row in rows if row.verdict == tolerances.NOISE and row.local is not None]
    if noisy:
        worst = max(noisy, key=lambda row: row.local.hides if row.local else 0.0)
        assert worst.local is not None
        yield f"a mistake below an NMSE of {worst.local.hides:.0e} could hide in it (at {worst.tap})"


def _is_wrong(local: Any) -> bool:
    return local is not None and local.verdict == tolerances.WRONG


def _also_baseline(blamed: Sequence[Row], baseline: Mapping[str, Any]) -> str:
    return f"it is {baseline.get('name')} whose {blamed[0].tap} is off on its own inputs"


def _right(whose: str, rows: Sequence[Row], gaps: bool) -> str:
    judged = [row for row in rows if row.local is not None]
    noisy = sum(row.verdict == tolerances.NOISE for row in rows)
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
    first = leading(wrong, diagnosis)
    assert first is not None
    records = [row for row in wrong if row.misrecorded]
    others = [row for row in wrong if row is not first and row not in records]
    slight = [row for row in others if is_slight(row, diagnosis)]
    if first.misrecorded:
        return _misrecorded(records, rows, whose) + _slight(slight) + _the_rest(rows, gaps)
    diagnosis = [d for d in diagnosis if not {row.tap for row in slight} >= set(d.taps)]
    why = next((d for d in diagnosis if first.tap in d.taps), None)
    known = [d for d in diagnosis if d.known and d is not why]
    rest = (f"; {_misrecorded(records, rows, whose)}" if records else "") + _slight(slight)
    rest += unjudged.other_origins(others) + unjudged.open_rest(rows) + _the_rest(rows, gaps)
    if why is not None and why.known:
        causes = _other_causes([d for d in diagnosis if d is not why], rows, why)
        return f"{first.tap}: {_possessive(whose)} {_place(first)} {_known(why, rows)}{causes}{rest}"
    named = {row.tap for row in slight}.union(*(d.taps for d in known))
    also = _others(first, [row for row in others if row.tap not in named]) + _other_causes(known, rows)
    return f"{first.tap}: {_possessive(whose)} {_place(first)} {_unknown(first, why)}{also}{rest}"


def _misrecorded(records: Sequence[Row], rows: Sequence[Row], whose: str) -> str:
    """That taps were written wrongly, what shows that they were computed rightly, and what they hold instead."""
    said = []
    for row in records[:_FEW]:
        readers = [other.tap for other in rows if row.tap in other.span]
        facts = [fact.says for fact in row.local.facts[:1]] if row.local is not None else []
        named = f" ({', '.join(readers[:_FEW])})" if readers else ""
        proof = f"what is computed from it{named} is right"
        said.append("; ".join([f"{row.tap}: {whose} recorded it wrongly and computed it rightly: {proof}", *facts]))
    more = [f"{len(records) - _FEW} more taps were recorded wrongly"] if len(records) > _FEW else []
    return "; ".join([*said, *more])


def _unknown(row: Row, why: Diagnosis | None) -> str:
    """That an op is wrong, by how much, and that no known bug is it."""
    assert row.local is not None
    size = f"local NMSE {row.local.nmse:.1e}, limit {row.local.limit:.0e}"
    if row.local.not_finite:
        size = unjudged.where_not_finite(row.local)
    unknown = f", and {diagnosis_text.nearest(why).split(';')[0]}" if why is not None and not row.span else ""
    read = [f": {fact.says}" for fact in why.read.get(row.tap, ())[:1]] if why is not None else []
    return f"is wrong on the inputs it was given ({size}){''.join(read)}{unknown}"


def _known(why: Diagnosis, rows: Sequence[Row]) -> str:
    """What a diagnosed op does, where, and the proof."""
    where = diagnosis_text.where(why, [row.tap for row in rows])
    return f"{diagnosis_text.clause(why)} ({f'{where}; ' if where else ''}{diagnosis_text.proof(why)})"


def explanation(d: Diagnosis, rows: Sequence[Row]) -> str:
    """A diagnosis as a sentence of its own."""
    row = next(row for row in rows if row.tap == d.tap)
    if d.known:
        return f"{_place(row)} {diagnosis_text.clause(d)}"
    read = [fact.says for fact in d.read.get(d.tap, ())]
    return f"{_place(row)}: {'; '.join([*read, diagnosis_text.nearest(d)])}"


def _other_causes(diagnosis: Sequence[Diagnosis], rows: Sequence[Row], said: Diagnosis | None = None) -> str:
    """The causes of the other WRONG taps: the known ones in their words, but for one that was ``said`` already."""
    known, unknown = [d for d in diagnosis if d.known], [d for d in diagnosis if not d.known]
    text = ""
    for d in known[:3]:
        row = next(row for row in rows if row.tap == d.tap)
        same = said is not None and diagnosis_text.names(d.causes) == diagnosis_text.names(said.causes)
        text += (
            f"; {d.tap} likewise: it {diagnosis_text.clause(d)}"
            if same
            else f"; {d.tap}: {_place(row)} {_known(d, rows)}"
        )
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


def _slight(rows: Sequence[Row]) -> str:
    """WRONG taps that are hardly off: they come after what matters."""
    if not rows:
        return ""
    named = ", ".join(row.tap for row in rows[:3]) + (f" and {len(rows) - 3} more" if len(rows) > 3 else "")
    most = max(row.local.nmse for row in rows if row.local is not None)
    verb = "differs by" if len(rows) == 1 else "differ by at most"
    return f"; {named} {verb} an NMSE of {most:.1e}, for no known reason: arithmetic"


def _others(first: Row, rest: Sequence[Row]) -> str:
    """The rest of the WRONG taps: the same op in other layers, then other ops."""
    if not rest:
        return ""
    word = first.tap.rsplit("-", 1)[0]
    same = [row for row in rest if row.tap.rsplit("-", 1)[0] == word]
    others = list(dict.fromkeys(row.tap.rsplit("-", 1)[0] for row in rest if row not in same))
    parts = []
    if same:
        parts.append(f"and in {diagnosis_text.layers_of([row.layer for row in same if row.layer is not None])}")
    if others:
        more = " and others" if len(others) > 4 else ""
        parts.append(f"{', '.join(others[:4])}{more} {'is' if len(others) == 1 else 'are'} wrong too")
    return "; " + ", ".join(parts)


def _the_rest(rows: Sequence[Row], gaps: bool) -> str:
    """What may be said of the other ops: only what was judged."""
    right = sum(row.verdict in (tolerances.MATCH, tolerances.NOISE) for row in rows)
    if not right:
        return ""
    if not gaps and not any(unjudged.has_open_places(row) for row in rows):
        return f"; every other op is {_quality(rows)}"
    others = f"the other {right} recorded taps are" if right > 1 else "the other recorded tap is"
    return f"; {others} {_quality(rows)}"


def _quality(rows: Sequence[Row]) -> str:
    """How right those are that are not wrong."""
    return "right up to rounding" if any(row.verdict == tolerances.NOISE for row in rows) else "right"


def unchecked(whose: str, rows: Sequence[Row], gaps: bool = False, coverage: Coverage | None = None) -> str:
    """That nothing was found wrong, and why that does not say that all is right."""
    if not rows:
        return f"nothing could be judged: {whose} recorded no tap of this model"
    differing = [row for row in rows if row.verdict == tolerances.UNCHECKED]
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
