"""Traces of some rows of a prompt, as they are judged: whoever gives them."""

from __future__ import annotations

from functools import partial

from llamadiff.engines.model_file import Runnable
from llamadiff.engines.reference_model import Model
from llamadiff.ext.rows.choose import AUTO, BY_CHANCE, has_gaps
from llamadiff.ext.rows.cut import cut, kept_of
from llamadiff.ext.rows.positions import in_tokens, looked_at
from llamadiff.ext.rows.row_engine import RowModel, keys_of
from llamadiff.plugins import SomeRows
from llamadiff.system.errors import UserError
from llamadiff.trace.reader import Trace


def some_rows(model: Runnable, baseline: Trace, candidate: Trace | None) -> SomeRows | None:
    """How a baseline of some rows is judged; None for one of all. Raises UserError for what cannot be judged so."""
    said = baseline.info.producer.get("rows")
    if not isinstance(said, dict) and not has_gaps(baseline.info.positions):
        return None
    if not isinstance(model, Model):
        raise UserError(
            f"{model.path}: rows of a prompt are judged by the reference engine, which does not run this file"
        )
    engine = model if isinstance(model, RowModel) else RowModel(model)
    said = said if isinstance(said, dict) else {}
    kept = {"baseline": kept_of(baseline, engine, "the baseline")}
    if candidate is not None:
        kept["candidate"] = kept_of(candidate, engine, "the candidate")
        candidate = cut(candidate, engine, baseline.info)
    engine.keep(kept)
    positions, total = baseline.info.positions, said.get("of")
    by_chance = BY_CHANCE if str(said.get("chosen")).startswith(AUTO) else 0
    note = looked_at(positions, total if isinstance(total, int) else positions[-1] + 1, by_chance)
    alone = baseline.lacking({*keys_of(engine).values()})
    return SomeRows(engine, alone, candidate, partial(in_tokens, positions=positions, note=note))
