"""A candidate's trace, cut to the rows that are judged, and what it kept of K and V of all tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.ext.rows.choose import in_words
from llamadiff.ext.rows.row_engine import RowModel, keys_of
from llamadiff.system.errors import UserError
from llamadiff.trace import taps
from llamadiff.trace.metadata import Info
from llamadiff.trace.reader import Trace

Array = NDArray[Any]


def kept_of(trace: Trace, engine: RowModel, whose: str) -> Trace:
    """A trace with K and V of all tokens, from its cache or from the taps that go there.

    Raises UserError if it lacks some.
    """
    last = max(trace.info.positions) + 1
    arrays = dict[str, Array]()
    for made, kept in keys_of(engine).items():
        found = next((name for name in (kept, made) if name in trace and len(trace[name]) >= last), None)
        if found is None:
            raise UserError(
                f"{whose} has {kept} of {len(trace[kept]) if kept in trace else 0} tokens: attention reads K and "
                f"V of all {last} up to its last row; write {kept}, [{last}, heads, channels], as your cache has it"
            )
        arrays[kept] = trace[found]
    return Trace(trace.info, arrays, dict.fromkeys(arrays, "F32"))


def cut(trace: Trace, engine: RowModel, wanted: Info) -> Trace:
    """The rows of a trace that are judged, in order. Raises UserError for one that lacks some of them."""
    own = dict(zip(trace.info.positions, range(len(trace.info.positions)), strict=True))
    lacking = [row for row in wanted.positions if row not in own]
    if lacking:
        raise UserError(
            f"the candidate has no rows {in_words(lacking, 5)}; write those too, or give those that it has as --rows "
            f"{in_words(trace.info.positions, 5)}"
        )
    places = np.array([own[row] for row in wanted.positions])
    pairs = zip(wanted.positions, places, wanted.tokens, strict=True)
    other = next(((row, place, right) for row, place, right in pairs if trace.info.tokens[place] != right), None)
    if other is not None:
        raise UserError(
            f"the candidate ran token {trace.info.tokens[other[1]]} at position {other[0]}, and llama.cpp {other[2]}: "
            "its prompt is another, or its tokenizer"
        )
    caches, arrays, known = {*keys_of(engine).values()}, dict[str, Array](), dict[str, Array]()
    for name in trace:
        tap = taps.parse(name)
        if tap is None or tap.causal:
            continue
        rows = np.array(wanted.positions) if name in caches and len(trace[name]) > len(own) else places
        arrays[name] = trace[name].take(rows, tap.row_axis)
        if name in trace.known:
            known[name] = trace.known[name].take(rows, tap.row_axis)
    info = Info(wanted.tokens, wanted.positions, len(wanted.tokens), None, trace.info.producer, trace.info.model)
    kinds = {name: trace.dtypes.get(name, "F32").replace("BF16", "F32") for name in arrays}  # which a look has widened
    return Trace(info, arrays, kinds, trace.path, known, trace.kept)
