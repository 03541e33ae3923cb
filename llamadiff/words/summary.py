"""What is said of a run of the model: the finding, and the clauses that prove it. Computes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from llamadiff.judge.preflight.checks import RECORDING, Check
from llamadiff.judge.preflight.shapes import SHAPES
from llamadiff.judge.statistics import CHECK as STATISTICS
from llamadiff.judge.verdict import MATCH, NOISE, UNCHECKED, WRONG
from llamadiff.result.comparison import Judged, Sides
from llamadiff.result.coverage import Coverage
from llamadiff.result.message import Message
from llamadiff.result.rows import Row
from llamadiff.trace.taps import WEIGHTS
from llamadiff.words import diagnosis_text, unjudged
from llamadiff.words.blame import blame, quality

_FEW_WAYS = 2  # of computing, that are told


def summarize(verdict: str, sides: Sides, judged: Judged) -> Message:
    """Which op is wrong since which layer, or that none is and how much noise there is."""
    said = _found_message(verdict, sides, judged)
    failed = [check for check in judged.preflight if check.verdict == WRONG]
    if failed:
        said = said.with_headline(_before_the_layers(failed))
    slips = [check.found for check in judged.preflight if check.name == RECORDING]
    first, *more = (said.headline, *slips) if verdict == WRONG else (*slips, said.headline)
    said = Message(first, (*more, *said.clauses))
    return said.plus(
        *_decode_steps(judged.rows, sides),
        *_unread(judged.only_engine_read, sides.baseline),
        *_unsure(judged.preflight),
        *(_stated_lines(judged.preflight) if judged.rows else ()),
        *judged.notes,
        *_ignored_lines(judged),
    )


def _found_message(verdict: str, sides: Sides, judged: Judged) -> Message:
    """What the taps say; of a candidate without taps, what its shapes, statistics or weights say."""
    checks = judged.preflight
    weights, stated = [check for check in checks if check.name.startswith(WEIGHTS)], _stated_lines(checks)
    if not judged.rows and any(check.name == SHAPES for check in checks):
        return Message("nothing else could be judged", tuple(stated))
    if not judged.rows and stated:
        return Message("; ".join(stated))
    if not judged.rows and weights:
        return Message(_weights_alone(_name(sides.candidate), weights))
    return _judgement(verdict, sides, judged)


def _ignored_lines(judged: Judged) -> Iterator[str]:
    """The tensors that stand for nothing."""
    if judged.coverage is not None:
        yield from unjudged.ignored_lines(judged.coverage, len(judged.rows), by_value=bool(judged.found_map))


def _stated_lines(checks: Sequence[Check]) -> list[str]:
    return [check.found for check in checks if check.name == STATISTICS]


def _before_the_layers(failed: Sequence[Check]) -> str:
    more = ""
    if len(failed) > 1:
        more = f" (and {_count(len(failed) - 1, 'more check')} {'fails' if len(failed) == 2 else 'fail'})"
    return f"before any layer, {failed[0].name}: {failed[0].found}{more}"


def _unread(names: Sequence[str], baseline: Mapping[str, Any]) -> Iterator[str]:
    """Tensors of the file that the engine uses, and the baseline does not."""
    if names:
        more = f" and {len(names) - 1} more of the file's tensors" if len(names) > 1 else ""
        yield f"{baseline.get('name')} does not read {names[0]}{more}, which the engine uses"


def _unsure(checks: Sequence[Check]) -> Iterator[str]:
    for check in checks:
        if check.verdict == UNCHECKED and check.name not in (STATISTICS, RECORDING):
            yield f"{check.name} could not be checked: {check.found}"


def _weights_alone(whose: str, weights: Sequence[Check]) -> str:
    """What is said where weights are all that there is to judge."""
    right, count = sum(check.verdict == MATCH for check in weights), len(weights)
    if count == 1:
        part = "the one weight" if right else "not even the one weight"
    elif right == count:
        part = "both weights" if count == 2 else f"all {count} weights"
    else:
        part = f"{right or 'none'} of the {count} weights"
    return f"{part} that {whose} dumped {'is' if min(right, count) <= 1 else 'are'} the file's, and it recorded no tap"


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}"


def _decode_steps(rows: Sequence[Row], run: Sides) -> Iterator[str]:
    """Whether all taps are right in the first batch, and since which one is wrong."""
    found = [row.local for row in rows if row.local is not None and _is_wrong(row.local)]
    if not found or len(run.batches) <= 1 or any(len(local.per_token) != len(run.tokens) for local in found):
        return
    wrong = min(next((i for i, each in enumerate(local.per_token) if each > local.noise_limit), 0) for local in found)
    if run.n_prefill <= wrong:
        step = wrong - run.n_prefill
        yield f"the prefill is right, the {'first' if step == 0 else f'{step + 1}.'} decode step is wrong"
    elif run.batches[0] <= wrong:
        number = sum(edge <= wrong for edge in (0, *accumulate(run.batches)))
        yield f"the prompt's first batch is right, its {'second' if number == 2 else f'{number}.'} is wrong"


def _name(candidate: Mapping[str, Any]) -> str:
    return str(candidate.get("name") or "the candidate")


def _judgement(verdict: str, sides: Sides, judged: Judged) -> Message:
    """What the taps say."""
    rows, diagnosis, gaps = judged.rows, judged.diagnosis, bool(judged.missing)
    baseline, is_engine = sides.baseline, sides.is_engine
    whose = str(baseline.get("name")) if is_engine else _name(sides.candidate)
    also = [_off_text(judged.blamed, baseline)] if judged.blamed else []
    if any(row.verdict == WRONG for row in rows):
        mistakes = [d for d in diagnosis if not d.harmless]
        return blame(rows, mistakes, whose, f"{_possessive(whose)} " if is_engine else "", gaps).plus(*also)
    if any(unjudged.has_open_places(row) for row in rows):
        return unjudged.unjudgeable(whose, str(baseline.get("name")), rows, judged.origin).plus(*also)
    if judged.blamed:
        right = (
            _right(whose, rows, gaps, judged.coverage)
            if rows
            else unchecked_message(whose, rows, gaps, judged.coverage)
        )
        return Message(_off_text(judged.blamed, baseline), (right.headline, *right.clauses))
    if verdict == UNCHECKED or not rows:
        return unchecked_message(whose, rows, gaps, judged.coverage)
    ways = [f"it {diagnosis_text.clause(d)}" for d in diagnosis if d.harmless][:_FEW_WAYS]
    own = judged.manner.clauses() if judged.manner is not None else ()
    return _right(whose, rows, gaps, judged.coverage).plus(*own, *ways, *_hidden_lines(rows), _drift(rows, is_engine))


def _hidden_lines(rows: Sequence[Row]) -> Iterator[str]:
    """How large a mistake the noise could hide, where there is any."""
    noisy = [row for row in rows if row.verdict == NOISE and row.local is not None]
    if noisy:
        worst = max(noisy, key=lambda row: row.local.hides if row.local else 0.0)
        assert worst.local is not None
        yield f"a mistake below an NMSE of {worst.local.hides:.0e} could hide in it (at {worst.tap})"


def _is_wrong(local: Any) -> bool:
    return local is not None and local.verdict == WRONG


def _off_text(blamed: Sequence[str], baseline: Mapping[str, Any]) -> str:
    more = f", and so are {len(blamed) - 1} more of its taps" if len(blamed) > 1 else ""
    return f"{_possessive(str(baseline.get('name')))} {blamed[0]} is off on its own inputs{more}"


def _possessive(name: str) -> str:
    return f"{name}'" if name.endswith("s") else f"{name}'s"


def _right(whose: str, rows: Sequence[Row], gaps: bool, coverage: Coverage | None) -> Message:
    judged = [row for row in rows if row.local is not None]
    noisy = sum(row.verdict == NOISE for row in rows)
    subject = f"what was recorded of {whose}" if gaps else f"every op of {whose}"
    noise = f", {noisy} of them noise" if noisy else ""
    of = f"{len(judged)} of {coverage.taps} taps" if gaps and coverage is not None else _count(len(judged), "tap")
    clause = f"{of} judged{noise}, {_worst(judged)}"
    return Message(f"{subject} is {quality(rows)} on the inputs it was given", (clause,))


def _worst(judged: Sequence[Row]) -> str:
    """The largest own error, and where."""
    worst = max(judged, key=lambda row: row.local.nmse if row.local else 0.0)
    assert worst.local is not None
    return f"worst own error {worst.local.nmse:.1e} at {worst.tap}"


def _right_so_far(whose: str, rows: Sequence[Row], coverage: Coverage) -> Message:
    """That what was judged is right, and that it is not enough."""
    judged = [row for row in rows if row.local is not None]
    part = f"{coverage.judged} of {coverage.taps} taps"
    said = f"{whose} is {quality(judged)} as far as it was recorded: {part}"
    return Message(said, (_worst(judged), unjudged.name_unjudged(rows, coverage)))


def _drift(rows: Sequence[Row], is_engine: bool) -> str:
    last = rows[-1]
    if last.drift is None:
        return "there is nothing to measure drift against"
    if last.ratio_to_noise is None:
        return f"{last.tap} drifts {last.drift.nmse:.1e} from the baseline"
    against = "exact arithmetic" if is_engine else "the baseline"
    if last.local is not None and len(last.drift.per_token) < len(last.local.per_token):
        against += f" over the first {len(last.drift.per_token)} tokens"
    if not math.isfinite(last.drift.nmse):
        return f"{last.tap} holds NaN or Inf on one side, so that there is no drift from {against}"
    noise = f"{last.ratio_to_noise:.1f}x" if last.ratio_to_noise < 100 else f"{last.ratio_to_noise:.0e}x"
    below = last.drift.nmse <= (last.expected_drift or 0.0)
    explained = "no more than" if below else f"{noise}"
    return f"{last.tap} drifts {last.drift.nmse:.1e} from {against}, {explained} what rounding in products explains"


def unchecked_message(whose: str, rows: Sequence[Row], gaps: bool = False, coverage: Coverage | None = None) -> Message:
    """That nothing was found wrong, and why that does not say that all is right."""
    if not rows:
        return Message(f"nothing could be judged: {whose} recorded no tap of this model")
    differing = [row for row in rows if row.verdict == UNCHECKED]
    if differing and differing[0].local is not None and differing[0].local.unclear:
        return unjudged.unclear(whose, differing)
    if differing:
        return Message(_first_differing(differing), ("give --model to learn which op is wrong",))
    if coverage is not None and not coverage.is_enough:
        return _right_so_far(whose, rows, coverage)
    return _right(whose, rows, gaps, coverage)


def _first_differing(rows: Sequence[Row]) -> str:
    """The first of the taps that differ; without a model nobody knows more."""
    first = rows[0]
    sound = first.candidate is None or not (first.candidate.nan or first.candidate.inf)
    if len(rows) == 1:
        return f"{first.tap} alone {'differs' if sound else 'differs, or holds NaN or Inf'}"
    return f"{first.tap} is the first of {len(rows)} taps that differ{'' if sound else ', or hold NaN or Inf'}"
