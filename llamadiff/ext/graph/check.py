"""One node of a graph, computed again from the inputs that it was given, and compared with what it gave."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from llamadiff.ext.graph.op import Array, Op, arithmetics, function_of, unfollowed
from llamadiff.numerics import metrics

NO_FUNCTION = "no function for"
NOT_LOOKED_AT = "not looked at"
UNKNOWN_ROUNDING = "since how this ggml rounds to eight bits is not known"
SORTED = ("ARGSORT", "TOP_K")
LEFT_OPEN = ("SSM_SCAN", "GATED_DELTA_NET")  # ops that leave some states unwritten: NaN in what we compute


@dataclass(frozen=True)
class NodeCheck:
    """What was found out about one node in one pass (``step``: 0 for the prefill, then decode steps).

    ``nmse`` is None where there is no function for the op, or it failed; ``problem`` says why. ``expected`` and
    ``found`` are the two values at ``index``, where they differ most. ``baseline`` and ``engine`` are moments of
    llama.cpp's values and ours. ``opened`` values could not be judged: on these inputs NaN or Inf is right there.
    ``rounding`` adds to the limit of ``nmse``, and may be ``estimated`` (``Recomputed``). ``closeup`` is what a page
    shows of it.
    """

    name: str
    tap: str | None
    op: str
    weight: str | None
    weight_type: str | None
    kind: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    step: int
    nmse: float | None
    arithmetic: str | None
    index: tuple[int, ...] = ()
    expected: float = 0.0
    found: float = 0.0
    baseline: metrics.Stats | None = None
    engine: metrics.Stats | None = None
    problem: str | None = None
    opened: int = 0
    rounding: float = 0.0
    estimated: bool = False
    closeup: object = None


def layers_of(checks: Sequence[NodeCheck]) -> list[int | None]:
    """The layer of each node: its name or its weight says so; else it is between two nodes of that layer."""
    stated = [_stated_layer(check) for check in checks]
    before, after = _filled(stated), _filled(stated[::-1])[::-1]
    return [layer if layer is not None else b if b == a else None
            for layer, b, a in zip(stated, before, after, strict=True)]  # fmt: skip


def _stated_layer(check: NodeCheck) -> int | None:
    match = re.search(r"-(\d+)\b|_l(\d+)\b", check.name) or re.match(r"blk\.(\d+)\.", check.weight or "")
    return int(next(group for group in match.groups() if group)) if match else None


def _filled(layers: Sequence[int | None]) -> list[int | None]:
    """Gaps take what stands before them."""
    last: int | None = None
    out = []
    for layer in layers:
        last = last if layer is None else layer
        out.append(last)
    return out


@dataclass(frozen=True)
class Recomputed:
    """The best of an op's arithmetics: its NMSE, what it rounds to, and what it gives.

    ``rounding``: what roundings that cannot be followed add to the limit, where the error is beyond ``enough``;
    ``estimated``: a device's, which its other nodes must show too.
    """

    nmse: float
    arithmetic: str
    values: Array
    rounding: float = 0.0
    estimated: bool = False


def replay(n: Op, found: Array, compute: Callable[[Op], Array] | None = None, enough: float = 0.0) -> Recomputed | None:
    """Compute an op under each arithmetic that ggml may use, until one is within ``enough``; None for an unknown op.

    ``compute`` stands in for the op's function (products with a file's weights are streamed).
    """
    function = compute or function_of(n.name)
    if function is None:
        return None
    best: Recomputed | None = None
    with np.errstate(all="ignore"):
        for tried in arithmetics(n):
            values = function(tried)
            nmse = distance(n, np.asarray(values), found)
            if best is None or nmse < best.nmse:
                best = Recomputed(nmse, _arithmetic(tried), values)
            if nmse <= enough:
                return best
        assert best is not None
        return replace(best, rounding=unfollowed(n))


class NodeArithmetics(Protocol):
    """In which arithmetics nodes are computed again."""

    def replayed(self, n: Op, found: Array, enough: float) -> Recomputed | None:
        """The first that is within ``enough`` of what was found, or the best; None for an unknown op."""

    def settled(self, checks: Sequence[NodeCheck]) -> list[NodeCheck]:
        """What could only be estimated, by what all nodes of a run show."""


@dataclass(frozen=True)
class PlainArithmetics:
    """Those that ggml has on most CPUs; ``compute`` stands in for ops' functions."""

    compute: Callable[[Op], Array]

    def replayed(self, n: Op, found: Array, enough: float) -> Recomputed | None:
        return replay(n, found, self.compute, enough)

    def settled(self, checks: Sequence[NodeCheck]) -> list[NodeCheck]:
        return list(checks)


def distance(n: Op, values: Array, found: Array) -> float:
    """NMSE of what was found against what was computed, in the places that can be judged."""
    return _nmse(*comparable(n, values, found))


def comparable(n: Op, values: Array, found: Array) -> tuple[Array, Array]:
    """What was computed and what was found, as they are compared: zero where an op cannot be judged.

    Of equal values either may come first when they are sorted.
    """
    values, found = np.asarray(values).reshape(np.shape(found)), np.asarray(found)
    if n.name in SORTED:
        x, first = n.x(), _sorted_first(n)
        if not _is_finite(x):
            return np.zeros(1), np.zeros(1)
        values, found = values[..., :first], found[..., :first]
        values, found = (np.take_along_axis(x, places.astype(np.int64), axis=-1) for places in (values, found))
        return (values, found) if n.name != "TOP_K" else (np.sort(values, axis=-1), np.sort(found, axis=-1))
    if n.name in LEFT_OPEN:
        return values, np.where(np.isnan(values), values, found)
    if np.isfinite(_nmse(values, found)):
        return values, found
    hidden = open_places(n, values, found)
    return np.where(hidden, 0, values), np.where(hidden, 0, found)


def _nmse(values: Array, found: Array) -> float:
    return metrics.nmse(found.reshape(1, -1), values.reshape(1, -1), 0)


def _sorted_first(n: Op) -> int | None:
    """How many of a row are sorted, the others behind them in any order (ik_llama.cpp's ARGSORT); None: all."""
    return int(n.ints[1]) or None if n.name == "ARGSORT" and len(n.ints) > 1 else None


def open_places(n: Op, values: Array, found: Array) -> Array:
    """Where an op cannot be judged: NaN or Inf is right there, or it was given some, and has some.

    What a kernel makes of them is nobody's fault: a maximum passes over a NaN, rounding to eight bits makes a number
    of it, and what is chosen by them may be anything. -Inf is what hides keys and experts.
    """
    if n.name in SORTED:
        return np.full(np.shape(found), not _is_finite(n.x()))
    if n.name in LEFT_OPEN or values.dtype.kind != "f":
        return np.zeros(1, bool)
    odd = _odd(values)
    if not _is_finite(found):
        given = (s.values for s in n.sources if s is not None and s.values.dtype.kind == "f")
        odd = odd if all(map(_is_finite, given)) else odd | ~np.isfinite(found) & ~(found == values)
    return odd


def _odd(x: Array) -> Array:
    return np.asarray(np.isnan(x) | np.isposinf(x))


def _is_finite(x: Array) -> bool:
    return not (x.dtype.kind == "f" and _odd(x).any())


def _arithmetic(n: Op) -> str:
    """What products round activations to; for other ops, float32."""
    return n.rounds_to(n.source_kind()) if n.name.startswith("MUL_MAT") else "F32"
