"""Products of chosen experts read back: which token's row, and which expert's matrix, each of them is of."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from llamadiff.ext.explain.pattern.deviation import listed
from llamadiff.ext.explain.read_back.observed import LARGEST, Array, Facts, Observed, first_fit
from llamadiff.judge.fact import Fact

Tried = Iterator[tuple[Array, Fact]]
FEW = 4  # products that are named one by one


def experts(o: Observed) -> Facts:
    """The rows, or the matrices, of the products that are wrong: o has [token, used, out]."""
    found = _parts(o)
    if found is not None:
        yield from first_fit(o.fits, _rows(o, *found), _matrices(o, *found))


def _parts(o: Observed) -> tuple[Array, Array, Array] | None:
    """Matrices [expert, out, in], inputs [token, used or 1, in] and the choice [token, used]; None where these do not
    give the right values.
    """
    case, weights = o.case, o.case.engine.w
    if case.weight is None or o.recorded.ndim != 3 or int(np.prod(weights.shape(case.weight))) > LARGEST:
        return None
    w = np.asarray(weights.whole(case.weight), np.float64)
    choice = f"ffn_moe_topk-{case.layer}"
    chosen = np.asarray(o.values(choice)).astype(int).reshape(o.recorded.shape[:2])
    multiplied = next(name for name in case.run.model.inputs(case.tap) if name != choice)
    x = np.asarray(o.values(multiplied), np.float64).reshape(len(chosen), -1, w.shape[-1])
    return (w, x, chosen) if o.is_right(np.einsum("tki,tkoi->tko", np.broadcast_to(x, (*chosen.shape, x.shape[-1])),
                                                  w[chosen])) else None  # fmt: skip


def _wrong(o: Observed) -> list[tuple[int, int]]:
    """The products that are wrong: token and place."""
    return [(int(t), int(k)) for t, k in zip(*np.nonzero(o.is_bad.any(axis=-1)), strict=True)]


def _rows(o: Observed, w: Array, x: Array, chosen: Array) -> Tried:
    """Rows of other tokens."""
    made, said, rows = o.expected.copy(), list[str](), list[int]()
    for t, k in _wrong(o):
        every = x[:, min(k, x.shape[1] - 1)] @ w[chosen[t, k]].T
        other = int(np.square(every - o.recorded[t, k]).sum(axis=1).argmin())
        made[t, k] = every[other]
        said.append(f"row {o.rows[other]} for token {o.rows[t]} (expert {chosen[t, k]})")
        rows += [int(o.rows[t]), int(o.rows[other])]
    named = [*said[:FEW], f"{len(said) - FEW} more"] if len(said) > FEW else said
    yield made, Fact("expert rows", f"it reads {listed(named)}", tuple(rows))


def _matrices(o: Observed, w: Array, x: Array, chosen: Array) -> Tried:
    """Matrices of other experts."""
    made, said = o.expected.copy(), dict[int, int]()
    for t, k in _wrong(o):
        every = w @ x[t, min(k, x.shape[1] - 1)]
        other = int(np.square(every - o.recorded[t, k]).sum(axis=1).argmin())
        made[t, k] = every[other]
        if said.setdefault(int(chosen[t, k]), other) != other:
            return
    pairs = [each for pair in said.items() for each in pair]
    says = f"it multiplies by {listed([f'expert {other} for {own}' for own, other in said.items()])}"
    yield made, Fact("expert matrices", says, tuple(pairs))
