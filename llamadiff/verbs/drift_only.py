"""Two traces without a model: how far apart they are, which says that something is wrong and not what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.engines.batches import batches_of
from llamadiff.engines.run_spec import USUAL, How
from llamadiff.judge.sketching import at_most, drift_from, stats_of
from llamadiff.judge.verdict import MATCH, of_check, of_run, of_unjudged
from llamadiff.numerics import metrics, tolerances
from llamadiff.numerics.pictures import closeup_of
from llamadiff.result.comparison import Comparison, Judged, Sides, assemble
from llamadiff.result.coverage import Coverage, asked_for_less, coverage_of
from llamadiff.result.logits import Logits, compare_logits, logit_rows
from llamadiff.result.message import Message
from llamadiff.result.rows import Row, blank
from llamadiff.system.errors import UserError
from llamadiff.trace import taps
from llamadiff.trace.last_row import is_last_row
from llamadiff.trace.metadata import Info
from llamadiff.trace.reader import Trace
from llamadiff.trace.sketch import Sketch
from llamadiff.trace.taps import LOGITS, WEIGHTS
from llamadiff.verbs.sketch_alone import note_on
from llamadiff.words import unjudged
from llamadiff.words.summary import unchecked_message

Array = NDArray[Any]


@np.errstate(all="ignore")
def drift_only(baseline: Trace, candidate: Trace, how: How = USUAL) -> Comparison:
    """Two traces without a model: taps that agree match, others cannot be judged."""
    sketch = baseline.sketch
    names = [name for name in baseline if not name.startswith(WEIGHTS)] if sketch is None else [*sketch.rows]
    both = [name for name in names if name in candidate]
    if sketch is None:
        rows = tuple(_row(name, baseline[name], candidate[name], how) for name in both)
    else:
        rows = tuple(_estimated_row(name, sketch, candidate[name]) for name in both)
    missing = tuple(name for name in names if name not in candidate)
    less = how.partial or asked_for_less(baseline.info.producer)
    coverage = coverage_of(rows, missing, candidate, [*names, LOGITS], (), less)
    logits = LOGITS in baseline and LOGITS in candidate
    judged = Judged(
        rows=rows,
        missing=missing,
        coverage=coverage,
        logits=_logits(baseline[LOGITS], candidate[LOGITS], how) if logits else None,
        timing={"engine_s": 0.0, "compare_s": 0.0},
    )
    steps = (
        *unjudged.steps_when_lacking(coverage),
        "give --model: with the model, every op of both sides is judged on its own inputs",
    )
    ruling = of_run([row.verdict for row in rows] or [of_unjudged()], [], (), coverage.is_enough)
    said = _drift_sentence(rows, coverage) if sketch is None else _sketch_sentence(rows, sketch.projections, how.rules)
    said = said.plus(*note_on(baseline))
    if baseline.path is not None and candidate.path is not None and baseline.path.samefile(candidate.path):
        said = said.with_headline(f"both are one and the same file, {baseline.path.name}: give the other side's trace")
    return assemble(_sides(baseline.info, candidate.info), judged, ruling, said, steps)


def _row(name: str, b: Array, c: Array, how: How) -> Row:
    """How far one tap of two traces is apart. Raises UserError where its shapes differ."""
    tap = taps.parse(name)  # None: a node of llama.cpp's graph that is no tap of the vocabulary
    op, axis = (tap.kind.op, tap.row_axis) if tap is not None else ("-", 0)
    if tap is not None and is_last_row(tap, c.size, b.shape):
        b, c = b[-1:], c.reshape(b[-1:].shape)
    if b.size != c.size or b.shape[axis : axis + 1] != c.shape[axis : axis + 1]:
        raise UserError(f"{name}: the baseline has shape {list(b.shape)}, the candidate {list(c.shape)}")
    sides = metrics.Rows(c.reshape(b.shape), axis), metrics.Rows(b, axis)
    drift = metrics.difference_of(*sides)
    limit = tolerances.rule_for(how.rules, name, op, "*").match
    stats = metrics.stats(b), metrics.stats(c)
    if tap is not None and tap.kind.word == taps.RESIDUAL:
        stats = metrics.with_extremes(stats[0], b), metrics.with_extremes(stats[1], c)
    axes = tap.kind.axes if tap is not None and len(tap.kind.axes) == b.ndim else ("row", *["value"] * (b.ndim - 1))
    seen = closeup_of(*sides, axes, drift.worst.index) if how.pictures else None
    agrees = drift.nmse <= limit and not any(side.nan or (side.inf and tap is not None) for side in stats)
    verdict = of_check(False, is_known=agrees)
    return replace(
        blank(name, taps.layer_of(name), op, tuple(b.shape)), verdict=verdict, drift=drift, baseline=stats[0],
        candidate=stats[1], closeup=seen,
    )  # fmt: skip


def _estimated_row(name: str, sketch: Sketch, c: Array) -> Row:
    """The same against a sketch: however near they are, nobody knows whether the values are the same."""
    tap, shape = taps.parse(name), sketch.shapes[name]
    assert tap is not None
    if c.shape != shape:
        raise UserError(f"{name}: the baseline has shape {list(shape)}, the candidate {list(c.shape)}")
    own = metrics.Rows(c, tap.row_axis)
    drift = drift_from(sketch, name, own)
    return replace(
        blank(name, tap.layer, tap.kind.op, shape), drift=drift, baseline=stats_of(sketch.rows[name]),
        candidate=metrics.stats(own),
    )  # fmt: skip


def _sides(baseline: Info, candidate: Info) -> Sides:
    """Who was compared, as far as the traces say."""
    return Sides(
        model=_unknown_model(baseline.model),
        tokens=tuple((token, None) for token in baseline.tokens),
        n_prefill=baseline.n_prefill,
        prompt=baseline.prompt,
        batches=batches_of(baseline),
        baseline={"name": "the baseline", **baseline.producer},
        candidate={"name": "the candidate", **candidate.producer},
    )


def _logits(b: Array, c: Array, how: How) -> Logits:
    """Of all rows, or of the last one where the candidate has no other."""
    rows = logit_rows(b)
    mine = c.reshape(-1, rows.shape[1])
    found = compare_logits(rows[-len(mine) :], mine, lambda _: None, None, how.expected_of(rows.shape[1]), how.pictures)
    return replace(found, after=len(rows))


def _drift_sentence(rows: Sequence[Row], coverage: Coverage) -> Message:
    if rows and all(row.verdict == MATCH for row in rows):
        if coverage.is_enough:
            return Message(f"the two traces agree on all {len(rows)} taps that both have")
        part = f"{coverage.judged} of {coverage.taps} taps"
        said = f"the two traces agree as far as both were recorded: {part}"
        return Message(said, (unjudged.name_unjudged(rows, coverage),))
    return unchecked_message("the candidate", rows)


def _sketch_sentence(rows: Sequence[Row], projections: int, rules: Sequence[tolerances.Rule]) -> Message:
    """Which taps differ as far as estimates prove it: by more than the limit, were they as much too large as can be."""
    most = at_most(projections)
    far = [row for row in rows if row.drift and not row.drift.nmse <= most * _limit(row, rules)]
    if not rows:
        return unchecked_message("the candidate", rows)
    if not far:
        return Message("a sketch cannot show that two runs are the same; no tap differs by more than it can prove")
    return Message(f"{far[0].tap} is the first of {len(far)} taps that differ by more than a sketch leaves in doubt")


def _limit(row: Row, rules: Sequence[tolerances.Rule]) -> float:
    return tolerances.rule_for(rules, row.tap, row.op, "*").match


def _unknown_model(info: Mapping[str, Any]) -> dict[str, Any]:
    empty = {"layers": 0, "embd": 0, "heads": 0, "kv_heads": 0, "vocab": 0, "weight_types": {}}
    return {
        "file": info.get("file"),
        "sha256": info.get("sha256", "0" * 64),
        "architecture": info.get("architecture"),
        **empty,
    }
