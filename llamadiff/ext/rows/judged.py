"""Traces of some rows of a prompt, as they are judged: whoever gives them."""

from __future__ import annotations

from dataclasses import replace

from llamadiff.engines.model_file import Runnable
from llamadiff.ext.rows.beside import strange_rows
from llamadiff.ext.rows.choose import AUTO, BY_CHANCE, has_gaps
from llamadiff.ext.rows.cut import cut, kept_of
from llamadiff.ext.rows.positions import in_tokens, looked_at
from llamadiff.ext.rows.row_engine import BASELINE, RowModel, keys_of
from llamadiff.judge.preflight.checks import Check
from llamadiff.judge.verdict import is_right
from llamadiff.plugins import SomeRows
from llamadiff.result.comparison import Comparison
from llamadiff.system.errors import UserError
from llamadiff.trace.reader import Trace
from llamadiff.verbs.judging import ruled_again


def some_rows(model: Runnable, baseline: Trace, candidate: Trace | None) -> SomeRows | None:
    """How a baseline of some rows is judged; None for one of all. Raises UserError for what cannot be judged so."""
    said = baseline.info.producer.get("rows")
    if not isinstance(said, dict) and not has_gaps(baseline.info.positions):
        return None
    if model.by_graph:
        raise UserError(
            f"{model.path}: rows of a prompt are judged by the reference engine, which does not run this file"
        )
    engine = model if isinstance(model, RowModel) else RowModel(model)
    said = said if isinstance(said, dict) else {}
    kept, alone = {BASELINE: kept_of(baseline, engine, "the baseline")}, baseline.lacking({*keys_of(engine).values()})
    traces = {BASELINE: alone}
    if candidate is not None:
        kept["candidate"] = kept_of(candidate, engine, "the candidate")
        traces["candidate"] = candidate = cut(candidate, engine, baseline.info)
    engine.keep(kept, traces)
    positions, total = baseline.info.positions, said.get("of")
    by_chance = BY_CHANCE if str(said.get("chosen")).startswith(AUTO) else 0
    note = looked_at(positions, total if isinstance(total, int) else positions[-1] + 1, by_chance)

    def finished(result: Comparison) -> Comparison:
        strange = strange_rows(kept, positions) if candidate is not None and is_right(result.verdict) else None
        result = in_tokens(result, positions, note)  # a check of all tokens speaks of tokens already
        return result if strange is None else _with_check(result, strange)

    return SomeRows(engine, alone, candidate, finished)


def _with_check(result: Comparison, check: Check) -> Comparison:
    """The result with one check more, which decides."""
    return ruled_again(replace(result, preflight=(*result.preflight, check)))
