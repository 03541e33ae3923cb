"""What a WRONG tap's error looks like: which tokens, heads and channels; what the wrong values are instead.

Each fact is one that narrows the cause down; none is a guess at it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from llamaref import ops
from llamaref.config import Rope
from numpy.typing import NDArray

from llamadiff import metrics, taps

Array = NDArray[Any]

PERIODS = (16, 32, 64, 128, 256)
SAME = 1e-4  # NMSE below which two tensors are taken for one (drift before the op leaves about this much)
MOVED = 1000.0  # how many times nearer sorting brings values that are in another order


@dataclass(frozen=True)
class Profile:
    """Facts about an error; None or empty where one does not apply.

    ``tokens``, ``heads`` and ``channels`` are those that are wrong, ``None`` if all are. ``ratio`` and ``offset``
    hold if recorded = ratio * expected, or expected + offset, everywhere. ``growth`` is the correlation of error
    and position. ``positions`` are those that RoPE's rows seem to have been rotated by.
    """

    tokens: tuple[int, ...] | None
    heads: tuple[int, ...] | None
    channels: tuple[int, ...] | None
    first_token_exact: bool
    growth: float | None
    ratio: float | None
    offset: float | None
    constant_row: bool
    period: int | None
    equals: str | None
    permutation: bool
    positions: tuple[int, ...] | None


def profile(tap: taps.Tap, recorded: Array, expected: Array, limit: float, others: Mapping[str, Array]) -> Profile:
    """Describe an error. Both arrays have the tap's shape; ``others`` are tensors it might have been mistaken for."""
    r, e = (np.moveaxis(np.asarray(x, np.float64), tap.row_axis, 0) for x in (recorded, expected))
    error, size = (r - e) ** 2, e**2
    finite = np.isfinite(error)
    error = np.where(finite, error, np.inf)
    bad = _wrong(error, size, limit)
    return Profile(
        tokens=_listed(bad.reshape(len(bad), -1).any(1)),
        heads=_heads(tap, bad),
        channels=_listed(bad.reshape(-1, bad.shape[-1]).any(0)) if not tap.causal else None,
        first_token_exact=not bad[0].any(),
        growth=_growth(error, size),
        ratio=_ratio(r, e),
        offset=_offset(r, e),
        constant_row=_constant_row(r, e),
        period=_period(bad) if not tap.causal else None,
        equals=_equals(recorded, others),
        permutation=_is_permutation(r, e),
        positions=None,
    )


def _wrong(error: Array, size: Array, limit: float) -> Array:
    """Elements whose error is out of proportion to the tensor's size."""
    mean = float(np.mean(size)) or 1.0
    return np.asarray(error > max(100 * limit, 1e-12) * mean)


def _listed(flags: Any) -> tuple[int, ...] | None:
    return None if flags.all() else tuple(int(i) for i in np.flatnonzero(flags))


def _heads(tap: taps.Tap, bad: Array) -> tuple[int, ...] | None:
    if tap.causal:  # [query, head, key]
        return _listed(bad.any(axis=(0, 2)))
    return _listed(bad.any(axis=(0, 2))) if bad.ndim == 3 and "dim" in tap.kind.axes else None


def _growth(error: Array, size: Array) -> float | None:
    """Correlation of each row's relative error with its position, where errors differ much; None elsewhere."""
    rows = [float(e.sum() / max(s.sum(), 1e-300)) for e, s in zip(error, size, strict=True)]
    if len(rows) < 6 or not np.isfinite(rows).all() or max(rows[1:]) < 100 * min(rows[1:]):
        return None
    return float(np.corrcoef(np.arange(len(rows)), np.log10(np.maximum(rows, 1e-30)))[0, 1])


def _explains(rest: Array, error: Array, e: Array) -> bool:
    """Whether what is left of an error is small, against the error and against the tensor: rounding may remain."""
    left = float((rest * rest).sum())
    return left <= 0.01 * float((error * error).sum()) and left <= SAME * float((e * e).sum())


def _ratio(r: Array, e: Array) -> float | None:
    norm = float((e * e).sum())
    if not norm or not np.isfinite(r).all():
        return None
    ratio = float((r * e).sum()) / norm
    return ratio if _explains(r - ratio * e, r - e, e) else None


def _offset(r: Array, e: Array) -> float | None:
    if not np.isfinite(r).all():
        return None
    offset = float((r - e).mean())
    return offset if offset and _explains(r - e - offset, r - e, e) else None


def _constant_row(r: Array, e: Array) -> bool:
    """Whether every token's error is the same vector, as when a bias is dropped."""
    if len(r) < 2 or not np.isfinite(r).all():
        return False
    error = r - e
    return _explains(error - error.mean(0), error, e)


def _period(bad: Array) -> int | None:
    """The smallest period in which the wrong channels repeat, if they do so without being all."""
    flags = np.asarray(bad.reshape(-1, bad.shape[-1]).any(0))
    if flags.all() or not flags.any():
        return None
    for period in PERIODS:
        if len(flags) % period == 0 and len(flags) > period:
            folded = flags.reshape(-1, period)
            if (folded == folded[0]).all():
                return period
    return None


def _equals(recorded: Array, others: Mapping[str, Array]) -> str | None:
    """The first of the others that has these values; NaN is nobody's."""
    if not np.isfinite(recorded).all():
        return None
    for name, other in others.items():
        if other.size == recorded.size and metrics.nmse(recorded.reshape(other.shape), other, 0) < SAME:
            return name
    return None


def _is_permutation(r: Array, e: Array) -> bool:
    """Whether every row has the right values in another order: sorting must bring them together, not just nearer."""
    if not np.isfinite(r).all():
        return False
    a, b = (x.reshape(len(x), -1) for x in (r, e))
    apart, together = metrics.nmse(a, b, 0), metrics.nmse(np.sort(a, axis=1), np.sort(b, axis=1), 0)
    return bool(together < SAME and together * MOVED < apart)


def rotations(recorded: Array, expected: Array, positions: Sequence[int], rope: Rope) -> tuple[int, ...] | None:
    """The position that each row of a RoPE tap [token, head, dim] seems to have been rotated by; None if by none.

    Rotations add up, so the row is the right one turned further: every turn up to the last position is tried.
    """
    reach = min(max(positions) + 2, 512)
    turns = np.arange(-reach, reach + 1)
    cos, sin = ops.rope_angles(rope, turns)
    for rotate in (ops.rope_pairs, ops.rope_halves):
        found = [_turn(rotate, row, right, cos, sin) for row, right in zip(recorded, expected, strict=True)]
        if all(error < SAME for _, error in found):
            return tuple(int(p + turns[turn]) for p, (turn, _) in zip(positions, found, strict=True))
    return None


def _turn(rotate: Callable[..., Array], row: Array, right: Array, cos: Array, sin: Array) -> tuple[int, float]:
    """Which turn of the right row comes nearest to the one recorded, and the NMSE it leaves."""
    turned = rotate(np.broadcast_to(right, (len(cos), *right.shape)).astype(np.float64), cos, sin)
    errors = ((turned - row) ** 2).sum(axis=(1, 2)) / max(float((row.astype(np.float64) ** 2).sum()), 1e-300)
    best = int(np.argmin(errors))
    return best, float(errors[best])


def in_words(p: Profile, n_tokens: int) -> Iterable[str]:
    """The facts of a profile, a clause each, the telling ones first."""
    if p.equals:
        yield f"the values are those of {p.equals}"
    if p.permutation:
        yield "every token has the right values in another order"
    if p.ratio is not None:
        yield f"it is {p.ratio:.4g} times what it should be, everywhere"
    if p.offset is not None:
        yield f"it is off by the constant {p.offset:.4g}"
    elif p.constant_row:
        yield "every token is off by the same vector, as when a bias is dropped"
    if p.positions is not None:
        yield f"its rows seem to be rotated by the positions {_some(p.positions)}"
    if p.first_token_exact:
        yield "the first token is exact"
    if p.growth is not None and p.growth > 0.8:
        yield "the error grows with the position"
    if p.tokens is not None and not (p.first_token_exact and len(p.tokens) == n_tokens - 1):
        yield f"only tokens {_some(p.tokens)} are wrong"
    if p.heads is not None:
        yield f"only heads {_some(p.heads)} are wrong"
    if p.period is not None:
        yield f"the wrong channels repeat every {p.period}"
    elif p.channels is not None:
        yield (
            f"{len(p.channels)} channels are wrong, from {p.channels[0]} on" if p.channels else "no channel stands out"
        )


def _some(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
