"""Checks the shapes that a candidate recorded: one row of logits is the last token's; a misfit is explained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.engines.model_file import Runnable
from llamadiff.judge.preflight.checks import Check
from llamadiff.judge.verdict import of_check
from llamadiff.numerics.transposes import advice
from llamadiff.trace.last_row import in_last_row, is_last_row
from llamadiff.trace.reader import Trace
from llamadiff.trace.taps import Tap

Array = NDArray[Any]

SHAPES = "shapes"  # the check's name
_NAMES = {"embd": "the embedding's length", "ff": "the feed-forward length", "vocab": "the size of the vocabulary"}


@dataclass(frozen=True)
class Misfit:
    """A tap that has other sizes than the model and the tokens ask for; ``ran``: the tokens that it would be right for,
    if there is such a number."""

    tap: Tap
    have: tuple[int, ...]
    want: tuple[int, ...]
    ran: int | None

    @property
    def columns(self) -> int:
        """Values of each row, all other axes taken together."""
        return int(np.prod(self.have)) // self.have[self.tap.row_axis]


def drop_misshapen(model: Runnable, baseline: Trace, trace: Trace) -> tuple[Trace, tuple[Misfit, ...]]:
    """A trace without the taps that do not fit, with those of the last row alone in their places; and the misfits."""
    arrays, known = {name: trace.stored(name) for name in trace}, dict(trace.known)
    misfits = []
    for tap in model.taps:
        want = _expected_shape(tap, model, baseline, len(trace.info.tokens)) if tap.name in trace else None
        if want is None or tap.name in known:
            continue
        have = trace.shape(tap.name)
        if is_last_row(tap, int(np.prod(have)), want):
            arrays[tap.name], known[tap.name] = in_last_row(arrays[tap.name], want)
        elif not _fits(tap, have, want):
            misfits.append(Misfit(tap, have, want, _tokens_of(tap, have, want, model)))
            del arrays[tap.name]
    if arrays.keys() == set(trace) and known.keys() == trace.known.keys():
        return trace, ()
    kinds = {name: trace.dtypes.get(name, "F32") for name in arrays}
    return Trace(trace.info, arrays, kinds, trace.path, known, trace.kept, trace.printed), tuple(misfits)


def _expected_shape(tap: Tap, model: Runnable, baseline: Trace, n_tokens: int) -> tuple[int, ...] | None:
    """The shape that a tap should have: as the file says, or else llama.cpp's; None if that is not known."""
    stated = model.shape_of(tap, n_tokens)
    if stated is None and tap.name in baseline and tap.name not in baseline.known:
        return baseline.shape(tap.name)
    return stated


def _fits(tap: Tap, have: Sequence[int], want: Sequence[int]) -> bool:
    """Whether rows are where they are expected, and the rest is as many values."""
    upto = tap.row_axis + 1
    return tuple(have[:upto]) == tuple(want[:upto]) and int(np.prod(have)) == int(np.prod(want))


def _tokens_of(tap: Tap, have: Sequence[int], want: Sequence[int], model: Runnable) -> int | None:
    axis, rows = tap.row_axis, have[tap.row_axis]
    whole = model.shape_of(tap, rows) or (*want[:axis], rows, *want[axis + 1 :])
    return rows if _fits(tap, have, whole) else None


def misfit_checks(model: Runnable, misfits: Sequence[Misfit], n_tokens: int) -> Iterator[Check]:
    """The misfits as what was found before any layer: nothing, if all fits."""
    if misfits:
        yield Check(SHAPES, of_check(misfits), "; ".join(_reasons(model, misfits, n_tokens)))


def steps_when_misfit(misfits: Sequence[Misfit], n_tokens: int) -> tuple[str, ...]:
    """What to do about them."""
    if not misfits:
        return ()
    if any(misfit.ran not in (None, n_tokens) for misfit in misfits):
        return (f"run your engine on the {n_tokens} ids that are stated, or state those that it ran",)
    return ("write these taps in the shapes that llamadiff taps MODEL lists, or say in a --map how they lie",)


def _reasons(model: Runnable, misfits: Sequence[Misfit], n_tokens: int) -> Iterator[str]:
    others = [misfit for misfit in misfits if misfit.ran not in (None, n_tokens)]
    for ran, count in Counter(misfit.ran for misfit in others).most_common():
        names = [misfit.tap.name for misfit in others if misfit.ran == ran]
        where = names[0] if count == 1 else f"{names[0]} and {count - 1} more"
        hint = "; if that is one token's, call it NAME@ROW (the last is NAME@-1)" if ran == 1 else ""
        yield f"your engine ran {ran} token{'s' if ran != 1 else ''}, {n_tokens} are stated ({where}{hint})"
    rest: dict[tuple[str, int], list[Misfit]] = {}
    for misfit in misfits:
        if misfit not in others:
            rest.setdefault((misfit.tap.kind.word, misfit.columns), []).append(misfit)
    for alike in rest.values():
        yield _columns(model, alike)


def _columns(model: Runnable, alike: Sequence[Misfit]) -> str:
    """That a tap has other columns, in so many layers, and what they would be right for."""
    first = alike[0]
    right = int(np.prod(first.want)) // first.want[first.tap.row_axis]
    where = f" in {len(alike)} layers" if len(alike) > 1 else ""
    if int(np.prod(first.have)) == int(np.prod(first.want)):
        axes = ", ".join(first.tap.kind.axes)
        how = advice(first.have, first.want)
        return f"{first.tap.name}{where} has shape {list(first.have)}, {list(first.want)} is right ({axes}){how}"
    reason = _reason(model, first.tap, first.columns)
    return f"{first.tap.name}{where} has {first.columns} columns, {right} are right{f': {reason}' if reason else ''}"


def _reason(model: Runnable, tap: Tap, columns: int) -> str | None:
    """What so many columns would be, where the file's sizes tell."""
    if model.shape_of(tap, 1) is None:
        return None
    sizes, parts = model.sizes, [part for axis in tap.kind.axes for part in axis.split("*")]
    if "dim" in parts:
        return _heads(model, "kv_head" if "kv_head" in parts else "head", columns)
    if "vocab" in parts and columns > sizes["vocab"]:
        return f"the vocabulary has {sizes['vocab']} entries; leave out the rows that pad it"
    return next((f"that is {words}" for name, words in _NAMES.items() if sizes[name] == columns), None)


def _heads(model: Runnable, which: str, columns: int) -> str | None:
    sizes: Mapping[str, int] = model.sizes
    heads, dim, other = sizes[which], sizes["dim"], sizes["head"]
    if which == "kv_head" and columns == other * dim != heads * dim:
        return f"that is {other} heads of {dim}, and K and V have {heads}"
    if columns % heads:
        return None
    each, key = columns // heads, "attention.key_length"
    stated = f"{key} says {dim}" if model.hyper_parameter(key) is not None else f"the model has {dim}"
    what = "n_embd / heads" if each == sizes["embd"] // other else "a part of each head, or more than one"
    return f"{each} a head is {what}; {stated}"
