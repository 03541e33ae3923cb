"""What any op may have done with its results: they are added up along an axis, or kept in steps of some size."""

from __future__ import annotations

import numpy as np

from llamadiff.diagnose.read_back.observed import Facts, Observed
from llamadiff.judge.pattern.deviation import Fact, numbered

FEWEST = 8  # steps that the largest value has, of those that are looked for, and different values that there are
STEPS = (1 / 15, 1 / 31, 1 / 63, 1 / 127, 1 / 255, *(2.0**-k for k in range(2, 17)))
AWAY, NEXT = 1e-3, 1.02  # steps that a value may be from a multiple of one, and from the right one
HEADS = ("kq", "kq_soft_max")  # taps whose first axis are heads


def in_steps(o: Observed) -> Facts:
    """Every value is a multiple of one step, next to the right one; beyond some size they may begin anew."""
    if o.shown is not None:  # solving leaves no steps
        return
    largest = float(np.abs(o.recorded).max())
    for step in STEPS:
        multiples = o.recorded / step
        if largest < FEWEST * step or np.abs(multiples - np.rint(multiples)).max() > AWAY:
            continue
        if len(np.unique(np.rint(multiples))) < FEWEST:
            return
        said = f"1/{round(1 / step)}"
        if np.abs(o.error).max() <= NEXT * step:
            yield Fact("in steps", f"its values are multiples of {said}", (step,))
            return
        size = step * 2.0 ** np.ceil(np.log2(largest / step))
        apart = np.mod(o.error + size, 2 * size) - size
        if np.abs(apart).max() <= NEXT * step:
            says = f"its values are multiples of {said}, and begin anew beyond -{size:g} and {size:g}"
            yield Fact("in steps", says, (step, float(size)))
        return


def added_up(o: Observed) -> Facts:
    """Each token's values, or each head's, are added to those of all before it, in all channels or in some."""
    if o.case.tap.kind.word in HEADS:
        if o.fits(np.cumsum(o.expected, axis=0)):
            yield Fact("accumulated", "each head's values are added to those of all heads before it", ())
        return
    bad, total = o.is_bad.any(axis=0), np.cumsum(o.expected, axis=0)
    if bad.ndim != 1 or not o.fits(np.where(bad, total, o.expected)):
        return
    channels = [int(channel) for channel in np.flatnonzero(bad)]
    where = "" if bad.all() else f"in channels {numbered(channels)} "
    yield Fact("accumulated", f"{where}each token's output is added to those of all tokens before it", tuple(channels))
