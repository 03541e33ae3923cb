"""Newton's method for many rows at once, each with a system of its own: Knoll and Keyes, Jacobian-free Newton-Krylov
methods (2004). A row's derivative is only asked what it makes of a direction.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from llamadiff.diagnose.case import Array

STEPS, DIRECTIONS = 10, 30  # of Newton; of a Krylov space
LEFT = 0.1  # of a step's gap, that a system may leave: the next step sees to it
STEP = 1e-3  # of a row's size, along which a derivative is taken
SETTLED = 1e-6  # of the wanted rows' size, that may be left
SHARES = (1.0, 0.5, 0.2, 0.05)  # of a step, of which each row takes the one that leaves least


def solved_by_rows(f: Callable[[Array], Array], wanted: Array, x: Array) -> Array:
    """Rows x [row, n] with f(x) = wanted, from some near them; NaN where none is found. f's rows are independent."""
    size = _sizes(wanted)
    gap = wanted - f(x)
    for _ in range(STEPS):
        if not np.isfinite(gap).all() or (_sizes(gap) <= SETTLED * size).all():
            break
        step = _krylov(f, x, wanted - gap, gap)
        tried = [x + share * step for share in SHARES]
        gaps = [wanted - f(each) for each in tried]
        best = np.argmin([np.nan_to_num(_sizes(each), nan=np.inf) for each in gaps], axis=0)[..., 0]
        rows = np.arange(len(x))
        after = np.stack(gaps)[best, rows]
        if (_sizes(after) >= 0.99 * _sizes(gap)).all():
            break
        x, gap = np.stack(tried)[best, rows], after
    return np.asarray(np.where(_sizes(gap) <= 100 * SETTLED * size, x, np.nan))


def _krylov(f: Callable[[Array], Array], x: Array, at: Array, gap: Array) -> Array:
    """The step that f's derivative at x, where f is ``at``, turns into most of the gap: by GMRES, in each row."""
    length = np.maximum(_sizes(gap), 1e-300)
    along = STEP * np.maximum(_sizes(x), 1e-300)
    basis = [gap / length]
    made = np.zeros((len(x), DIRECTIONS + 1, DIRECTIONS))  # what each direction is turned into, in the basis
    shares: Array = np.zeros((len(x), 1))
    for k in range(min(DIRECTIONS, x.shape[-1])):
        new = (f(x + along * basis[k]) - at) / along
        for _ in range(2):  # a second time for what rounding left
            for i, each in enumerate(basis):
                part = (new * each).sum(axis=-1)
                new, made[:, i, k] = new - part[:, None] * each, made[:, i, k] + part
        made[:, k + 1, k] = _sizes(new)[:, 0]
        system = made[:, : k + 2, : k + 1]
        if not np.isfinite(system).all():
            break
        shares = np.linalg.pinv(system, rcond=1e-8)[..., 0]
        left = (system @ shares[..., None])[..., 0] - np.eye(1, k + 2)
        if (_sizes(left) <= LEFT).all():
            break
        basis.append(new / np.maximum(_sizes(new), 1e-300))
    step: Array = length * np.einsum("rk,krn->rn", shares, np.stack(basis[: shares.shape[1]]))
    return step


def _sizes(x: Array) -> Array:
    return np.asarray(np.sqrt(np.square(x).sum(axis=-1, keepdims=True)))
