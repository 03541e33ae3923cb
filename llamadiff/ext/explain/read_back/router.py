"""A router read back: the ranks of the experts that it chose, and what their weights were divided by."""

from __future__ import annotations

import numpy as np

from llamadiff.ext.explain.pattern.deviation import counted, factor, numbered
from llamadiff.ext.explain.read_back.observed import Facts, Observed, factor_of, sole
from llamadiff.judge.fact import Fact


def choice(o: Observed) -> Facts:
    """Which ranks the chosen experts have: [token, used] of the scores [token, expert]."""
    scores = o.input(0, o.shape())
    chosen = o.recorded.astype(int)
    if chosen.ndim != 2 or chosen.min() < 0 or chosen.max() >= scores.shape[1]:
        return
    order = np.argsort(-scores, axis=-1, kind="stable")
    ranks = np.argsort(order, axis=-1)[np.arange(len(scores))[:, None], chosen]
    if (ranks == ranks[0]).all() and set(ranks[0]) != set(range(chosen.shape[1])):
        was, right = sorted(int(rank) + 1 for rank in ranks[0]), list(range(1, chosen.shape[1] + 1))
        are = "are" if len(right) > 1 else "is"
        says = f"it chooses the experts of {counted('rank', was)}, where {numbered(right)} {are} right"
        yield Fact("ranks", says, tuple(was))
        return
    for expert in range(scores.shape[1]):
        without = np.where(np.arange(scores.shape[1]) == expert, -np.inf, scores)
        best = np.argsort(-without, axis=-1, kind="stable")[:, : chosen.shape[1]]
        if (best == chosen).all():
            yield Fact("never chosen", f"it never chooses expert {expert}", (expert,))
            return


def share(o: Observed) -> Facts:
    """Weights [token, used] made to sum to one: what they were divided by."""
    x = o.input()
    factors = factor_of(x, o.recorded, axis=-1)
    if not (factors > 0).all() or not o.fits(factors[:, None] * x):
        return
    total = x.sum(axis=-1)
    more, times = sole(1 / factors - total, 1e-3 * float(total.min())), sole(factors, 1e-3 * float(factors.min()))
    if more is not None and abs(more) > 1e-3 and o.fits(x / (total + more)[:, None]):
        yield Fact("divided by", f"weights are divided by their sum plus {more:.4g}", (more,))
    elif times is not None:
        yield Fact("multiplied", f"weights are multiplied by {factor(times)}, whatever their sum", (times,))


def mixture(o: Observed) -> Facts:
    """The experts' sum [token, embd]: by what each one's output [token, used, embd] was multiplied."""
    names = o.input_names()
    if len(names) != 2 or not names[0].startswith("ffn_moe_down"):
        return
    down, weights = (o.input(i, o.shape(i)) for i in (0, 1))
    found = np.stack([np.linalg.lstsq(d.T, y, rcond=None)[0] for d, y in zip(down, o.recorded, strict=True)])
    if not o.fits((down * found[..., None]).sum(axis=1)):
        return
    times = [sole(found[:, j] / weights[:, j], 1e-3) for j in range(weights.shape[1])]
    said = [time for time in times if time is not None]
    if len(said) == len(times):
        values = ", ".join(map(factor, said))
        says = f"the chosen experts count {values} times as much as their weights"
        yield Fact("expert counts", says, tuple(said))
