"""Mistakes in rows as they are read, a cache's and experts', which are right themselves; and of some rows alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from proof.strangers.engine import Bug, Edit, Engine
from proof.unlisted.bugs import Unlisted

Array = np.ndarray
SMALL = 0.2494  # some way between two values of K, and of V
SIDES = {"K": ("kq-0", "read_keys"), "V": ("kqv_out-0", "read_values")}


def _part(axis: int, places: list[int], factor: float) -> Callable[[Array], Array]:
    """Some rows, heads or channels times a factor."""

    def changed(rows: Array) -> Array:
        out = np.moveaxis(rows.copy(), axis, 0)
        out[places] *= rows.dtype.type(factor)
        return np.moveaxis(out, 0, axis)

    return changed


def _plus(rows: Array) -> Array:
    """A bias that a channel of K or V does not have."""
    return rows + np.where(np.arange(rows.shape[-1]) == 3, 0.05, 0.0).astype(rows.dtype)


def _with_row_before(rows: Array) -> Array:
    return rows + rows.dtype.type(0.05) * np.concatenate([np.zeros_like(rows[:1]), rows[:-1]])


def _small_are_zero(rows: Array) -> Array:
    return np.where(abs(rows) < SMALL, rows.dtype.type(0), rows)


# name -> what becomes of the rows [key, head, dim], and what is said of it
MISTAKES: dict[str, tuple[Callable[[Array], Array], str]] = {
    "head": (_part(1, [0], 1.03), "it reads {}'s head 0 times 1.03"),
    "row": (_part(0, [5], 1.05), "it reads {}'s row 5 times 1.05"),
    "channels": (_part(2, [62, 63], 0.9), "it reads {}'s channels 62 and 63 times 0.9"),
    "bias": (_plus, "0.05 is added to {}'s channel 3, in all heads"),
    "leak": (_with_row_before, "0.05 times the row before is added to each row of {} that it reads"),
    "whole": (np.rint, "it reads {} rounded to the nearest whole number"),
    "cut": (np.trunc, "it reads {} rounded to whole numbers, towards zero"),
    "limit": (lambda rows: np.clip(rows, -2, 2), "it limits the values of {} to 2"),
    "small": (_small_are_zero, "it reads zeros for the values of {} that are below 0.2494"),
}


def _unlisted(side: str, name: str) -> Unlisted:
    (tap, reads), (change, says) = SIDES[side], MISTAKES[name]
    bug = Bug(f"{side}: {name}", {reads: lambda e, right, rows: change(right(rows)).astype(rows.dtype)})
    return Unlisted(bug.name, tap, says.format(side), bug)


def _late_scores(change: Callable[[Engine, Edit, Array, Array], Array], first: int) -> dict[str, Edit]:
    """Scores of the queries from ``first`` on that are others."""

    def scores(e: Engine, right: Edit, q: Array, keys: Array) -> Array:
        return np.concatenate([right(q[:first], keys), change(e, right, q[first:], keys)], axis=1)

    return {"scores": scores}


def _page(e: Engine, right: Edit, q: Array, keys: Array) -> Array:
    return right(q, np.concatenate([keys[:4], keys[:4], keys[8:]]))


def _half(e: Engine, right: Edit, q: Array, keys: Array) -> Array:
    return right(np.where(np.arange(q.shape[-1]) < 32, q, q.dtype.type(0)), keys)


def _late_values(e: Engine, right: Edit, p: Array, values: Array) -> Array:
    """The last two queries read V's second page of four rows from the first one's place."""
    other = np.concatenate([values[:4], values[:4], values[8:]])
    return np.concatenate([right(p[:, :10], values), right(p[:, 10:], other)], axis=1)


def _from_the_chunk(e: Engine, right: Edit, queries: Array, keys: Array) -> Array:
    """From the sixth token on, queries are counted from there."""
    return np.where(queries < 6, right(queries, keys), right(queries - 6, keys))


def _next_row(e: Engine, right: Edit, x: Array, stem: str, chosen: Array) -> Array:
    """The first two tokens' up is that of the row after."""
    out = right(x, stem, chosen)
    if stem == "ffn_up_exps":
        out[:2] = right(x[1:3], stem, chosen[:2])
    return out


def _other_expert(e: Engine, right: Edit, x: Array, stem: str, chosen: Array) -> Array:
    return right(x, stem, np.where(chosen == 3, 1, chosen) if stem == "ffn_gate_exps" else chosen)


SOME = [
    Unlisted("K: a page twice", "kq-0",
             "in place of K's rows 4, 5, 6, 7 it reads rows 0, 1, 2, 3, from token 8 on alone",
             Bug("K: a page twice", _late_scores(_page, 8))),
    Unlisted("K: half a head", "kq-0", "it reads the first 32 of K's 64 channels alone, from token 8 on alone",
             Bug("K: half a head", _late_scores(_half, 8))),
    Unlisted("V: a page twice", "kqv_out-0",
             "in place of V's rows 4 to 7 it reads those from row 0 on, from token 10 on alone",
             Bug("V: a page twice", {"mixed": _late_values})),
    Unlisted("mask from the chunk", "kq_soft_max-0",
             "queries do not see the last 6 keys, their own among them, from token 6 on alone",
             Bug("mask from the chunk", {"hidden": _from_the_chunk})),
    Unlisted("experts: next row", "ffn_moe_up-0",
             "it reads row 1 for token 0 (expert 2), row 1 for token 0 (expert 0), "
             "row 2 for token 1 (expert 3), row 2 for token 1 (expert 2)",
             Bug("experts: next row", {"experts": _next_row}), "moe"),
    Unlisted("experts: another", "ffn_moe_gate-0", "it multiplies by expert 1 for 3",
             Bug("experts: another", {"experts": _other_expert}), "moe"),
]  # fmt: skip

KEPT = {each.name: each for each in SOME} | {
    f"{side}: {name}": _unlisted(side, name) for side in SIDES for name in MISTAKES
}
