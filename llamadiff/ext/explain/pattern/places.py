"""Where values are wrong: which tokens, heads and channels, and where the op's own inputs are large or small."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.ext.explain.pattern.deviation import SAME, Deviation, are, counted, numbered
from llamadiff.judge.fact import Fact, runs_of

Array = NDArray[Any]

PERIODS = (16, 32, 64, 128, 256)
FEW = 4  # that are counted one by one; values on either side of a bound, that it takes to believe in it
GROWS = 0.8  # correlation of error and position
ELEMENTWISE = ("SWIGLU", "GEGLU", "GELU", "SWIGLU_OAI")


def tokens(d: Deviation) -> Iterator[Fact]:
    """Which rows are wrong, if not all."""
    rows = np.flatnonzero(d.bad_rows).tolist()
    if not rows or len(rows) == len(d.bad_rows):
        return
    if len(rows) == len(d.bad_rows) - 1 and rows[0] == 1:
        yield Fact("first right", "the first token is right", (0,))
    else:
        yield Fact("tokens", f"only {counted('token', rows)} {are(rows)} wrong", tuple(rows))


def growth(d: Deviation) -> Iterator[Fact]:
    """Whether rows' relative errors grow with their position."""
    n = len(d.error)
    error, size = (x.reshape(n, -1).sum(axis=1) for x in (d.error, np.square(d.expected)))
    rows = error / np.maximum(size, 1e-300)
    if n < 6 or not np.isfinite(rows).all() or max(rows[1:]) < 100 * min(rows[1:]):
        return
    found = float(np.corrcoef(np.arange(n), np.log10(np.maximum(rows, 1e-30)))[0, 1])
    if found > GROWS:
        yield Fact("growth", "the error grows with the position", (found,))


def heads(d: Deviation) -> Iterator[Fact]:
    """Which heads are wrong, if not all."""
    if not d.tap.causal and (d.bad.ndim != 3 or "dim" not in d.tap.kind.axes):
        return
    wrong = np.flatnonzero(d.bad.any(axis=(0, 2))).tolist()
    if 0 < len(wrong) < d.bad.shape[1]:
        yield Fact("heads", f"only {counted('head', wrong)} {are(wrong)} wrong", tuple(wrong))


def channels(d: Deviation) -> Iterator[Fact]:
    """Which channels are wrong, if not all: a period of them, or a list."""
    if d.tap.causal:
        return
    flags = np.asarray(d.bad.reshape(-1, d.bad.shape[-1]).any(axis=0))
    wrong = np.flatnonzero(flags).tolist()
    if not 0 < len(wrong) < len(flags):
        return
    for period in PERIODS:
        if len(flags) % period == 0 and len(flags) > period:
            folded = flags.reshape(-1, period)
            if (folded == folded[0]).all():
                yield Fact("period", f"the wrong channels repeat every {period}", (period, *wrong))
                return
    yield from _only("channel", wrong, len(flags))


def _only(what: str, wrong: Sequence[int], n: int) -> Iterator[Fact]:
    """Which of ``n`` are wrong; where those are nearly all, which are right; nothing where both are scattered."""
    right = sorted(set(range(n)) - set(wrong))
    if len(right) <= FEW < len(wrong):
        yield Fact(f"{what}s", f"every {what} but {numbered(right)} is wrong", tuple(wrong))
    elif len(wrong) <= n / 2 or len(runs_of(wrong)) < FEW:
        yield Fact(f"{what}s", f"only {counted(what, wrong)} {are(wrong)} wrong", tuple(wrong))


def bounds(d: Deviation) -> Iterator[Fact]:
    """A bound of an input of an elementwise op, beyond which alone values are wrong."""
    if d.tap.kind.op not in ELEMENTWISE or not d.finite:
        return
    for name, values in d.inputs.items():
        x = np.asarray(values, np.float64)
        if x.size == d.bad.size and np.isfinite(x).all():
            yield from _bound(name, x.reshape(d.bad.shape), d.bad)


def _bound(name: str, x: Array, bad: Array) -> Iterator[Fact]:
    for kind, sign, side in (("below", x, "<="), ("above", -x, ">=")):
        if bad.sum() < FEW:
            return
        bound = float(sign[bad].max())
        beyond = sign <= bound
        if (~beyond).sum() >= max(FEW, beyond.sum()) and bad[beyond].mean() >= 0.5:
            at = bound if kind == "below" else -bound
            yield Fact(kind, f"it is wrong only where {name} {side} {at:.4g}", (name, at))
            return


def first_token(d: Deviation) -> Iterator[Fact]:
    """Whether the first token's attention is its own V, which is all that it sees."""
    v = next((values for name, values in d.inputs.items() if name.startswith(("kv_v-", "Vcur_proj-"))), None)
    if d.tap.kind.word != "kqv_out" or v is None or not d.dim or not d.finite or not d.bad_rows.any():
        return
    row, own = d.recorded[0].ravel(), np.asarray(v[0], np.float64).reshape(-1, d.dim)
    whole = np.repeat(own, row.size // own.size, axis=0).ravel()
    if float(np.square(row - whole).sum()) <= SAME * float(np.square(whole).sum()):
        yield Fact("own V", "its first token is its own V, as it must be", (True,))
    else:
        yield Fact("own V", "its first token is not its own V, though it sees nothing else", (False,))
