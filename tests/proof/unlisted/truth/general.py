"""Checks of what is read back of any op, and of what fits no other file."""

from __future__ import annotations

import numpy as np

from proof.strangers.arithmetic import silu
from proof.unlisted.truth.attention import key_rows, mixed, scored, scores, values_of
from proof.unlisted.truth.ffn import gate_up
from proof.unlisted.truth.op import Array, Op, numbers
from proof.unlisted.truth.products import changed, factors


def in_steps(op: Op, parts: str, anew: str | None) -> bool:
    """All values are whole numbers of steps, and a step or less from the right one, but for whole turns."""
    steps, away = op.r * int(parts), np.abs(op.r - op.e)
    if anew:
        away = np.minimum(away % (2 * float(anew)), -away % (2 * float(anew)))
    return bool(np.abs(steps - np.rint(steps)).max() < 2e-3 and away.max() * int(parts) < 1.03)


def tokens_added(op: Op, channels: str | None) -> bool:
    """``channels`` may leave some out: then the fact has them."""
    some, total = np.array(op.fact.values), np.cumsum(op.e, axis=0)
    whole = channels is None or "more" in channels or numbers(channels) == list(some)
    values = op.e.copy()
    values[:, some] = total[:, some]
    return whole and op.are(values) and (channels is not None) == (len(some) < op.e.shape[1])


def keys_and_zeros(op: Op, were: str | None, instead: str | None, zero: str) -> bool:
    k = key_rows(op)
    rows = np.arange(len(k))
    if were and instead:
        rows[numbers(were)] = numbers(instead)
    made = scored(op, k[rows])
    made[:, :, numbers(zero)] = 0.0
    return op.are(made)


def rows_of_heads(op: Op, said: str) -> bool:
    v = values_of(op, op.layer)
    was, count = v.copy(), len(v)
    for part in said.split(", "):
        steps, _, side, *_, head = part.split()
        for s in range(count):
            at = s + int(steps) * (-1 if side == "before" else 1)
            v[s, int(head)] = was[at, int(head)] if 0 <= at < count else 0.0
    return op.are(mixed(op, v=v))


def row_places(op: Op, step: str, right: str, tokens: tuple[int, ...]) -> bool:
    table = np.asarray(op.file["token_embd.weight"], np.float64)
    n = table.shape[1]
    rows = np.array([table.ravel()[i * int(step) : i * int(step) + n] for i in tokens])
    return int(right) == n and op.are(rows)


def row_sizes(op: Op, low: str, high: str) -> bool:
    """Rows are the right ones times a factor, and nothing else."""
    times = np.square(op.e).sum(axis=1) / (op.r * op.e).sum(axis=1)
    near = np.isclose(times.min(), float(low), rtol=1e-3) and np.isclose(times.max(), float(high), rtol=1e-3)
    return bool(near and op.are(op.e / times[:, None]))


def by_blocks(op: Op, size: str) -> bool:
    """The loop itself, row by row."""
    x, _ = scores(op)
    made = np.zeros(x.shape)
    for h, t in np.ndindex(x.shape[:2]):
        row = x[h, t, : t + 1] * op.file.hyper.dim**-0.5
        for start in range(0, t + 1, int(size)):
            block = row[start : start + int(size)]
            made[h, t, start : start + len(block)] = np.exp(block - block.max())
        made[h, t] /= made[h, t].sum()
    return op.are(made)


def other_channels(op: Op, were: str, what: str, instead: str) -> bool:
    gate, up = (x.copy() for x in gate_up(op))
    taken = gate if what == "gate" else up
    taken[:, numbers(were)] = taken[:, numbers(instead)]
    return op.are(silu(gate) * up)


def fewer_inputs(op: Op, first: str, step: str, side: str) -> bool:
    _, w, x = factors(op)
    change = np.zeros(op.r.shape)
    for c in range(len(w)):
        count = min(max(int(first) + c * int(step) * (1 if side == "more" else -1), 0), w.shape[1])
        change[:, c] = -x[:, count:] @ w[c, count:]
    return changed(op, change)


def rows_moved(
    op: Op, whose: str | None, name: str | None, other: str | None, side: str | None, *part: str | None
) -> bool:
    """Each token's row is what the op makes of another token's row of one input."""
    count = len(op.e)
    rows = np.arange(count)
    taken = {"before": rows - 1, "after": rows + 1, "first": 0 * rows, "last": 0 * rows + count - 1}[
        whose or side or ""
    ]
    there = (taken >= 0) & (taken < count)
    some = _part_of(count, *part) & there
    read = name or other
    inputs = np.asarray(op.taps[read], np.float64)
    moved = inputs[np.clip(taken, 0, count - 1)]
    if op.word.startswith("ffn_swiglu"):
        gate, up = (np.asarray(op.of(word), np.float64) for word in ("ffn_gate", "ffn_up"))
        values = gated(moved, up) if read.startswith("ffn_gate") else gated(gate, moved)
    elif op.word in ("ffn_inp", "l_out"):
        values = op.e - inputs + moved
    else:
        values = op.e[np.clip(taken, 0, count - 1)]
    mask = some.reshape(-1, *[1] * (op.e.ndim - 1))
    return bool(some.any()) and op.are(np.where(mask, values.reshape(op.e.shape), op.r if not part else op.e))


def gated(gate: Array, up: Array) -> Array:
    return gate / (1 + np.exp(-gate)) * up


def _part_of(count: int, first: str | None = None, those: str | None = None) -> Array:
    """The rows that a sentence speaks about."""
    if first is not None:
        return np.arange(count) >= int(first)
    return np.isin(np.arange(count), numbers(those)) if those is not None else np.ones(count, bool)
