"""What the error of one tap looks like: it is held beside all that its values might be instead."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from llamaref.config import Rope
from numpy.typing import NDArray

from llamadiff.ext.explain.pattern import instead, places
from llamadiff.ext.explain.pattern.deviation import Deviation, finite_facts
from llamadiff.ext.explain.pattern.turned import turns
from llamadiff.judge.compared import Compared
from llamadiff.judge.fact import Fact
from llamadiff.judge.lanes import Lane, Source
from llamadiff.trace import taps

Array = NDArray[Any]
MOST = 200  # look-alikes that are compared


def described(
    seen: Compared, source: Source, lane: Lane, limit: float, rope: Rope | None, dim: int | None
) -> tuple[Fact, ...]:
    """What a source's errors look like against what a lane computed.

    ``limit`` is the NMSE that right arithmetic may have, ``rope`` what the tap is the result of, ``dim`` a head's size.
    """
    values = (seen.recorded[source.name], seen.x[seen.lanes.index(lane)])
    own = [np.asarray(seen.comparable(array, source, ranked=True), np.float64) for array in values]
    recorded, expected = (np.moveaxis(array, seen.tap.row_axis, 0) for array in own)
    others = _look_alikes(seen, source, recorded.size)
    return profile(Deviation(
        seen.tap, recorded, expected, limit, others=others, inputs=_inputs(source, seen.tap), rope=rope,
        positions=[int(p) for p in seen.positions], dim=dim,
    ))  # fmt: skip


def _look_alikes(seen: Compared, source: Source, size: int) -> Mapping[str, Array]:
    """Tensors of this size that the values might be instead: the trace's own before it, the baseline's others."""
    out: dict[str, Array] = {}
    for trace, label in ((source.trace, "its own {}"), (seen.sources["baseline"].trace, "the baseline's {}")):
        own, listed = trace is source.trace, True
        for name in trace:
            listed = listed and name != seen.tap.name
            wanted = _is_before(name, seen.tap, listed) if own else name != seen.tap.name
            if wanted and name not in trace.known and int(np.prod(trace.shape(name))) == size and len(out) < MOST:
                out[label.format(name)] = trace[name]
    return out


def _is_before(name: str, tap: taps.Tap, listed: bool) -> bool:
    """Whether a tap comes before another one in the graph; of a name that is no word of it, whether it is listed so.

    What is computed from the values cannot be what they are instead.
    """
    other = taps.parse(name)
    if other is None or taps.parse(tap.name) != tap:
        return listed
    return _place(other) < _place(tap)


def _place(tap: taps.Tap) -> tuple[float, int]:
    """Where a tap comes in the graph: those outside the layers are first, or last."""
    first = next(place for place, kind in enumerate(taps.KINDS) if kind.layered)
    place = taps.KINDS.index(tap.kind)
    outside = -1.0 if place < first else math.inf
    return outside if tap.layer is None else float(tap.layer), place


def _inputs(source: Source, tap: taps.Tap) -> dict[str, Array]:
    """What a source recorded of the taps that one may read in its layer."""
    words = [*re.split(r"[ |]", tap.kind.inputs), *(["Vcur_proj"] if tap.kind.word == "kqv_out" else [])]
    names = [f"{word}-{tap.layer}" for word in words]
    return {name: source.trace[name] for name in names if name in source.trace and name not in source.trace.known}


INSTEAD = (
    instead.zeros, instead.another_tensor, instead.other_axes, instead.other_rows, instead.other_channels,
    instead.factors, instead.shifts, turns, instead.parts,
)  # fmt: skip
WHERE = (places.first_token, places.tokens, places.growth, places.heads, places.channels, places.bounds)


def profile(d: Deviation) -> tuple[Fact, ...]:
    """What the values are instead of the right ones, and where they are wrong; the telling facts first."""
    return finite_facts(fact for facts in (*INSTEAD, *WHERE) for fact in facts(d))
