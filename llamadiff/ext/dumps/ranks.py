"""Tensors of tensor-parallel ranks, put together: those that hold parts, those that add up, those that hold the same.

How a tensor is split is found from its shapes: where the ranks have as many values together as the tap has, they are
joined along the axis that the tap then has. Where each rank has as many as the tap, its values tell: they are equal,
or, of an op that sums over what is split, they are parts of a sum. What must be equal and is not is a fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.candidates.name_map import Entry, most_values
from llamadiff.engines.model_file import Runnable
from llamadiff.numerics.arithmetic import precision
from llamadiff.trace.last_row import ENDS
from llamadiff.trace.taps import LOGITS, Tap, shape_of, size_of

Array = NDArray[Any]
Shape = tuple[int, ...]
ByRank = Mapping[int, Array]

ONE, SPLIT, WHOLE = "one", "split", "whole"
MUST = "must have the same"
SUMS = ("MUL_MAT", "MUL_MAT_ID", "GET_ROWS")  # ops of which ranks may hold parts of a sum over what is split
SAME = {"f16": 1e-6, "bf16": 5e-5}  # NMSE of a row that is the same to some units of its type's last digit
SAME_F32 = 1e-9
ALIKE = 1e-3  # NMSE of a difference that is another one
NEAR = 0.1  # NMSE of one rank's values, from llama.cpp's, that are all of a sum
UNLIKE = 0.5  # of both sides' squares: what parts of a sum differ by, where nothing else tells them from replicas


@dataclass(frozen=True)
class Plan:
    """How the tensors of the ranks are put together: ``axis`` along which, ``copies`` ranks in a row with the same
    part, ``length`` of the axis that is kept (0: all). ``of_tokens``: ranks have tokens of their own."""

    kind: str
    axis: int = 0
    copies: int = 1
    length: int = 0
    of_tokens: bool = False


def plan_of(shapes: Mapping[int, Shape], rows: int, tap: Tap | None, entry: Entry | None, model: Runnable) -> Plan:
    """How tensors of these shapes by rank, of a step of so many tokens, are put together."""
    first, count, uneven = next(iter(shapes.values())), len(shapes), _uneven_axis(list(shapes.values()))
    if count == 1 or uneven is not None:
        return Plan(ONE) if uneven is None else Plan(SPLIT, uneven)
    whole = math.prod(first) * count if tap is None or entry is None else most_values(None, tap, entry, model, rows)
    if rows not in first and first[:1] == (rows / count,) and math.prod(first) * count == whole:
        return Plan(SPLIT, 0, of_tokens=True)  # sequence-parallel
    own = rows if rows in first else 1
    width = math.prod(first) // own
    if tap is None or entry is None:
        return _plan_by_width(width, first, count, rows, model)
    want = most_values(None, tap, entry, model, own) // own
    if tap.causal:
        want = want // own * max((1, *first[1:]))  # keys of all steps so far
    if width < want and width * count % want == 0:
        copies = width * count // want
        return Plan(SPLIT, _axis(first, count // copies, tap, entry, model, rows), copies)
    is_padded = tap.name == LOGITS and width < want < width * count  # as a vocabulary is, to be split evenly
    return Plan(SPLIT, len(first) - 1, 1, want) if is_padded else Plan(WHOLE)


def _uneven_axis(shapes: Sequence[Shape]) -> int | None:
    """The one axis along which shapes differ."""
    if len({len(shape) for shape in shapes}) > 1:
        return None
    axes = [axis for axis, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1]
    return axes[0] if len(axes) == 1 else None


def _plan_by_width(width: int, shape: Shape, count: int, rows: int, model: Runnable) -> Plan:
    """How tensors of a name that no map has are put together: as a tap would be that the model has."""
    widths = {math.prod(shape_of(tap, rows, model.sizes)) // rows for tap in model.taps}
    if width * count not in widths:
        return Plan(WHOLE)
    of_rows = next((axis for axis, size in enumerate(shape) if size == rows), 0)
    others = [axis for axis, size in enumerate(shape) if axis != of_rows and not (size == 1 and axis == 0)]
    return Plan(SPLIT, others[0] if others else len(shape) - 1)


def _axis(shape: Shape, parts: int, tap: Tap, entry: Entry, model: Runnable, rows: int) -> int:
    """The axis of which ranks hold parts: with that many of them it has a size that the tap has an axis of."""
    axes = [axis for axis in entry.axes or tap.kind.axes if axis not in ("batch", "token", "query", "key")]
    sizes = {**model.sizes, "batch": 1, **({"kv_head": model.sizes["head"]} if "repeated" in entry.done else {})}
    stated = [axis for axis in entry.axes or tap.kind.axes if axis != "batch"]
    of_rows = row_axis(shape, rows, tap, entry)
    is_named = len(stated) == len(shape) and stated[of_rows] in ("token", "query")
    is_apart = len(shape) - (shape[0] == 1 and not is_named) > 2  # heads have an axis of their own
    names = {name for axis in axes for name in (axis.split("*") if is_apart else (axis,)) if name != "dim"}
    if "kv_head" in {part for axis in tap.kind.axes for part in axis.split("*")}:
        names |= {name.replace("head", "kv_head") for name in names if "kv_head" not in name}
    if not is_apart:
        names |= {f"{name}*dim" for name in names if name.endswith("head") and "dim" in tap.kind.axes}
    known = {size_of(name, sizes) for name in names}
    fitting = [axis for axis in range(len(shape)) if shape[axis] * parts in known and axis != of_rows]
    return fitting[-1] if fitting else len(shape) - 1


def row_axis(shape: Shape, rows: int, tap: Tap, entry: Entry) -> int:
    """The axis of a tensor that runs over tokens: by the names of its axes, or else the first of that size."""
    names = [each for each in entry.axes or tap.kind.axes if each != "batch"]
    place = next((n for n, each in enumerate(names) if each in ("token", "query")), 0)
    before = len(shape) - len(names)  # a batch of one, or heads that have an axis of their own
    place += before if before > 0 and shape[0] == 1 and shape[place] != rows else 0
    fits = place < len(shape) and shape[place] == rows
    return place if fits else next((axis for axis, size in enumerate(shape) if size == rows), 0)


def nmse(values: Array, right: Array) -> float:
    """The worst row's, rows being those of all axes but the last; NaN in the same places is the same."""
    width = values.shape[-1] if values.ndim else 1
    own, theirs = (np.asarray(each, np.float64).reshape(-1, width) for each in (values, right))
    same = np.isnan(own) & np.isnan(theirs)
    gap = np.where(same | (own == theirs), 0, own - theirs)
    size = np.maximum(np.nansum(np.square(theirs), axis=1), 1e-300)
    return float(np.nan_to_num((np.square(gap).sum(axis=1) / size), nan=np.inf).max(initial=0.0))


@dataclass
class Ranks:
    """What was seen of the ranks so far, in graph order.

    ``right`` gives llama.cpp's values of a tap in a step, where they are known; ``step`` is that one's in words.
    ``fault``: the first tap that ranks must have alike and have not; behind it each went on with its own. ``parts``: of
    the last tap that was a sum, each rank's.
    """

    right: Callable[[str], Array | None] = lambda _: None
    step: str = ""
    numbers: tuple[int, ...] = ()
    fault: str = ""
    joined: dict[str, int] = field(default_factory=dict)
    added: dict[str, list[ByRank]] = field(default_factory=dict)
    equal: set[str] = field(default_factory=set)
    parts: tuple[str, ByRank] | None = None

    def put_together(self, plan: Plan, arrays: ByRank, tap: Tap | None, name: str) -> Array:
        """The values of all ranks in one."""
        self.numbers = max(self.numbers, tuple(arrays), key=len)
        values = list(arrays.values())
        if plan.kind == ONE or (tap is None and all(nmse(each, values[0]) <= SAME["bf16"] for each in values)):
            return values[0]
        if plan.kind == SPLIT:
            self.joined[name] = plan.axis
            groups = [values[start : start + plan.copies] for start in range(0, len(values), plan.copies)]
            for number, group in enumerate(groups):
                ranks = list(arrays)[number * plan.copies :][: plan.copies]
                self.compare(name, dict(zip(ranks, group, strict=True)), "hold the same part of it")
            whole = np.concatenate([group[0] for group in groups], axis=plan.axis)
            return whole.take(range(plan.length), axis=plan.axis) if plan.length else whole
        if tap is None or self._is_sum(arrays, tap):
            self.added.setdefault(name, []).append(arrays)
            self.parts = name, arrays
            total: Array = np.sum([each.astype(np.float64) for each in values], axis=0).astype(np.float32)
            return total
        return self.compare(name, arrays, MUST)

    def compare(self, name: str, arrays: ByRank, why: str) -> Array:
        """The values that ranks must have alike; those of the base rank, with a fault, where they have not."""
        if len(arrays) == 1:
            return next(iter(arrays.values()))
        base = self._likeliest(name, arrays)
        limit = SAME.get(precision(arrays[base]), SAME_F32)
        off = {rank: apart for rank, each in arrays.items() if (apart := nmse(each, arrays[base])) > limit}
        if off:
            who = f"rank{'s' * (len(off) > 1)} {' and '.join(map(str, off))} and rank {base}"
            says = f"{name}: {self.step}{who} {why}, and are off by an NMSE of {max(off.values()):.1e}"
            self.fault = says + self._why(arrays, base, name)
        else:
            self.equal.add(name)
        return arrays[base]

    def _likeliest(self, name: str, arrays: ByRank) -> int:
        """The rank that is nearest to llama.cpp, or else to the others."""
        right = self._right_for(name, next(iter(arrays.values())))
        if right is not None:
            return min(arrays, key=lambda rank: nmse(arrays[rank], right))
        apart = {rank: sorted(nmse(each, own) for each in arrays.values()) for rank, own in arrays.items()}
        return min(arrays, key=lambda rank: apart[rank][: len(arrays) // 2 + 1])

    def _right_for(self, name: str, like: Array) -> Array | None:
        right = self.right(name)
        if right is None or right.size != like.size:
            return None
        fitted: Array = right.reshape(like.shape)
        return fitted

    def _why(self, arrays: ByRank, base: int, name: str) -> str:
        """What the ranks added of the sum before, where that is what they differ by."""
        right = self._right_for(name, arrays[base])
        nearest = "" if right is None else f"; rank {base} is the nearest to llama.cpp's"
        if self.parts is None:
            return nearest
        summed, parts = self.parts
        if parts.keys() != arrays.keys() or parts[base].size != arrays[base].size:
            return nearest
        total = np.sum([each.astype(np.float64) for each in parts.values()], axis=0)
        off = {n: arrays[n].astype(np.float64) - arrays[base] for n in arrays if nmse(arrays[n], arrays[base]) > ALIKE}
        ways = {
            f": each adds its own part of {summed}; the all-reduce (the sum over ranks) is missing": parts[base],
            f": there it is the part of {summed} that is added, and on rank {base} the sum over ranks": total,
        }
        for says, of_base in ways.items():
            gaps = {number: parts[number] - of_base for number in off}
            if off and all(nmse(gap.reshape(total.shape), gaps[number]) <= ALIKE for number, gap in off.items()):
                return says
        return nearest

    def _is_sum(self, arrays: ByRank, tap: Tap | None) -> bool:
        """Whether ranks hold parts of a sum, and not the same values."""
        if tap is None or tap.kind.op not in SUMS or tap.kind.axes[-1] != "embd":
            return False
        first, *others = arrays.values()
        if all(nmse(each, first) <= SAME["bf16"] for each in others):
            return False
        right = self._right_for(tap.name, first)
        if right is not None:
            total = np.sum([each.astype(np.float64) for each in arrays.values()], axis=0)
            least = min(nmse_of_all(each, right) for each in arrays.values())
            if (together := nmse_of_all(total, right)) < least or least < NEAR:
                return together < least
        return not are_alike(first, others[0])


def are_alike(one: Array, other: Array) -> bool:
    """Whether two ranks' values are more like each other than parts of a tensor or of a sum are."""
    if one.shape != other.shape:
        return False
    size = sum(float(np.square(each, dtype=np.float64).sum()) for each in (one, other))
    return float(np.square(one.astype(np.float64) - other).sum()) <= UNLIKE * size


def nmse_of_all(values: Array, right: Array) -> float:
    """NMSE of all values together."""
    size = float(np.square(right, dtype=np.float64).sum())
    return float(np.square(values.astype(np.float64) - right).sum()) / size if size else math.inf


def is_last_alone(tap: Tap | None) -> bool:
    """Whether engines compute a tap of the last token of each step alone."""
    return tap is not None and tap.name in ENDS
