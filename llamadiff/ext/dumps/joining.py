"""The tensors of a dump as a trace: those of its ranks put together, step after step, and how, in words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.candidates import name_map
from llamadiff.candidates.pieces import Piece, Unread
from llamadiff.candidates.source import Context, assemble
from llamadiff.engines.model_file import Runnable
from llamadiff.ext.dumps.labels import Step, names_for
from llamadiff.ext.dumps.ranks import MUST, ONE, SPLIT, WHOLE, Plan, Ranks, are_alike, is_last_alone, plan_of
from llamadiff.ext.dumps.steps import Parts, Steps
from llamadiff.numerics.arithmetic import precision
from llamadiff.result.rows import stem
from llamadiff.system.errors import UserError
from llamadiff.trace.reader import Printed, Trace
from llamadiff.trace.taps import Tap, shape_of

Array = NDArray[Any]
Known = tuple[Tap, name_map.Entry] | None

FEW = 1
SUM = " (sum over ranks)"  # behind a name, where values are to tell whether ranks hold parts of a tensor or of a sum
# Products that engines make in one, and what they are apart; the sizes of the parts are the model's.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@dataclass(frozen=True)
class Joined:
    """How a tap was put together: the rank of each value of a token, in the tap's shape; of a sum, each rank's part."""

    ranks: Array | None = None
    sums: Mapping[int, Array] = field(default_factory=dict)


@dataclass
class _Tensor:
    """One tensor of a candidate: what a map calls it, its tap if it has one, and its parts."""

    name: str
    known: Known
    parts: dict[Step, dict[int, Unread]]
    row: int | None = None
    source: str = ""  # what it is called in the dump
    steps: dict[int, Array] = field(default_factory=dict)  # those that were read, by their number
    owners: dict[int, Array] = field(default_factory=dict)  # of each value, its rank


@np.errstate(all="ignore")  # what is not finite shows in the values
def load_trace(path: Path, parts: Parts, steps: Steps, context: Context) -> Trace:
    """A dump as a trace. Raises UserError, with the dump's path, for what does not fit the model or the tokens."""
    try:
        steps = steps.within(str(path), context.tokens)
        return _Loading(steps, context).trace(parts)
    except UserError as error:
        raise type(error)(error if str(error).startswith(str(path)) else f"{path}: {error}") from None


class _Loading:
    """One dump being read."""

    def __init__(self, steps: Steps, context: Context) -> None:
        self.steps, self.context, self.model = steps, context, context.model
        self.names = name_map.Names(context.mapping, context.model)
        self.is_auto = context.mapping is name_map.AUTO
        self.ranks = Ranks()

    def trace(self, parts: Parts) -> Trace:
        tensors, extras = self._sorted(parts)
        for number, tensor in product(range(len(self.steps.names)), tensors):
            self._read(tensor, number)
            if self.ranks.fault and not self.is_auto:
                break
        pieces = [piece for tensor in tensors for piece in self._pieces(tensor)]
        rows = self.steps.rows
        trace = assemble([*pieces, *extras], self.context, {"name": "the dump"}, self.context.tokens)
        info = replace(trace.info, n_prefill=rows[0], batches=rows if len(rows) > 1 else ())
        joined = {tensor.known[0].name: self._joined(tensor) for tensor in tensors if tensor.known is not None}
        printed = Printed(notes=(*self._notes(),), faults=self._faults(), joined=joined)
        arrays = {name: trace.stored(name) for name in trace}
        summed = {name: precision(next(iter(some[0].values()))) for name, some in self.ranks.added.items()}
        return Trace(info, arrays, trace.dtypes, known=trace.known, kept={**summed, **trace.kept}, printed=printed)

    # -- names ---------------------------------------------------------------------------------------------------------

    def _sorted(self, parts: Parts) -> tuple[list[_Tensor], list[Unread]]:
        """The tensors that stand for taps, in graph order; and those that stand for none, of which none is read."""
        order = {tap.name: place for place, tap in enumerate(self.model.taps)}
        found: dict[str, _Tensor] = {}
        extras: list[Unread] = []
        for name, of_all in self._unfused(parts):
            by_step = {step: by_rank for step, by_rank in of_all.items() if step in self.steps.names}
            if not by_step:
                continue
            called, known = self._known(name)
            first = next(iter(next(iter(by_step.values())).values()))
            key = called if first.row is None else f"{called}@{first.row}"
            if (
                (known is None and not self.is_auto)
                or first.shape is None
                or (key in found and not self._add(found[key], name, by_step))
            ):
                extras.append(replace(first, name=name))
            elif key not in found:
                found[key] = _Tensor(called, known, by_step, first.row, name)
                if self.is_auto and known is None and any(len(by_rank) > 1 for by_rank in by_step.values()):
                    found[f"{key}{SUM}"] = _Tensor(f"{called}{SUM}", known, by_step, first.row, name)
        return sorted(found.values(), key=lambda each: order.get(each.known[0].name, 0) if each.known else -1), extras

    def _add(self, tensor: _Tensor, name: str, by_step: Mapping[Step, dict[int, Unread]]) -> bool:
        """Whether these are more ranks and steps of a tensor, in folders of their own; what is the same twice is not.

        Raises UserError for two of one name, of one rank and step.
        """
        if not _overlap(tensor.parts, by_step):
            for step, by_rank in by_step.items():
                tensor.parts.setdefault(step, {}).update(by_rank)
            return True
        if name.rpartition("/")[2] == tensor.source.rpartition("/")[2]:
            raise UserError(
                f"{tensor.source} and {name} are one tensor's; say in the names of folders or files which rank and "
                "step they are of (rank1, step_2), or give one"
            )
        return False

    def _known(self, name: str) -> tuple[str, Known]:
        """What the map calls a tensor, and its tap."""
        bare = name.partition("@")[0]
        return next(((each, known) for each in names_for(bare) if (known := self.names.tap(each))), (bare, None))

    def _unfused(self, parts: Parts) -> Iterator[tuple[str, dict[Step, dict[int, Unread]]]]:
        """The parts, products apart that were made in one, where the map has names for them alone."""
        for name, by_step in parts.items():
            fused = next((word for word in FUSED if word in name and self._known(name)[1] is None), None)
            apart = [name.replace(fused, word) for word in FUSED[fused]] if fused else []
            if fused is None or any(self._known(each)[1] is None for each in apart):
                yield name, by_step
                continue
            for place, each in enumerate(apart):
                yield each, {step: self._cut_all(by_rank, place, len(apart)) for step, by_rank in by_step.items()}

    def _cut_all(self, by_rank: Mapping[int, Unread], place: int, count: int) -> dict[int, Unread]:
        return {rank: self._cut(tensor, place, count, len(by_rank)) for rank, tensor in by_rank.items()}

    def _cut(self, whole: Unread, place: int, count: int, ranks: int) -> Unread:
        """One of the products that a tensor has one after the other along its last axis."""
        shape = whole.shape or (0,)
        width, sizes = shape[-1], self.model.sizes
        first = sizes["head"] * sizes["dim"] // ranks if count == 3 else width // 2
        edges = [0, first, *(first + (width - first) * part // (count - 1) for part in range(1, count))]
        start, stop = edges[place], edges[place + 1]

        def read(most: int) -> tuple[Array, None]:
            return whole.read(most * width)[0][..., start:stop], None

        return Unread(whole.name, whole.row, (*shape[:-1], max(0, stop - start)), read)

    # -- values --------------------------------------------------------------------------------------------------------

    def _read(self, tensor: _Tensor, number: int) -> None:
        """Its values in a step, those of all ranks put together."""
        by_rank = dict(sorted(tensor.parts.get(self.steps.names[number], {}).items()))
        if not by_rank:
            return
        tap, entry = tensor.known or (None, None)
        rows, start = self._rows(tensor, number), self.steps.starts[number]
        most = self._most(tap, entry)
        arrays: dict[int, Array] = {}
        for rank, each in by_rank.items():
            if each.shape is not None and math.prod(each.shape) > most:
                if tap is not None and entry is not None:
                    name_map.most_values(each.shape, tap, entry, self.model, len(self.context.tokens))
                return
            values = each.read(most)[0]
            arrays[rank] = values.reshape(_in_rows(values.shape, rows, tap))
        plan = self._plan(tensor, number)
        if plan.kind == ONE and tap is not None and entry is not None and self.steps.has_ranks:
            self._refuse_part(*next(iter(arrays.items())), tap, entry, rows)
        if tap is None and len(arrays) > 1:
            first, *others = arrays.values()
            if plan.kind == WHOLE and not tensor.name.endswith(SUM) and any(are_alike(first, each) for each in others):
                tensor.steps[number] = self.ranks.compare(tensor.name, arrays, MUST)
                return
            is_same, is_sum = all(np.array_equal(first, each) for each in others), tensor.name.endswith(SUM)
            if (is_same and is_sum) or (not is_same and not is_sum and plan.kind != SPLIT):
                return
            plan = Plan(WHOLE) if is_same or is_sum else plan
        name = tap.name if tap is not None else tensor.name
        self.ranks.step = f"in step {number + 1}, " if len(self.steps.names) > 1 else ""
        self.ranks.right = lambda wanted: self._right(wanted, tap, start, rows)
        whole = self.ranks.put_together(plan, arrays, tap, name)
        tensor.steps[number] = whole
        if plan.kind == SPLIT:
            numbered = {rank: np.full(each.shape, rank, np.float32) for rank, each in arrays.items()}
            tensor.owners[number] = _along(plan, numbered)

    def _refuse_part(self, rank: int, values: Array, tap: Tap, entry: name_map.Entry, rows: int) -> None:
        """Raise UserError for what one rank has of a tap, where the others' are not there."""
        own = rows if rows in values.shape else 1
        width, want = values.size // own, name_map.most_values(None, tap, entry, self.model, own) // own
        if not tap.causal and width < want and want % width == 0:
            raise UserError(
                f"{tap.name}: rank {rank} has {width} of its {want} values of a token, and no other rank has it; "
                "give the folder that holds all ranks, or tensors that were gathered"
            )

    def _rows(self, tensor: _Tensor, number: int) -> int:
        """How many tokens it is of in a step."""
        return self.steps.rows[number] if tensor.row is None else 1

    def _plan(self, tensor: _Tensor, number: int) -> Plan:
        """How its ranks are put together in a step; along which axis, that of most tokens tells best."""

        def of_step(number: int) -> Plan:
            by_rank = sorted(tensor.parts.get(self.steps.names[number], {}).items())
            tap, entry = tensor.known or (None, None)
            rows = self._rows(tensor, number)
            shapes = {rank: _in_rows(each.shape or (), rows, tap) for rank, each in by_rank}
            return plan_of(shapes, rows, tap, entry, self.model)

        numbers = [n for n, name in enumerate(self.steps.names) if name in tensor.parts]
        own, longest = of_step(number), of_step(max(numbers, key=self.steps.rows.__getitem__))
        is_alike = own.kind == longest.kind == SPLIT and not (own.of_tokens or longest.of_tokens)
        return replace(own, axis=longest.axis) if is_alike else own

    def _most(self, tap: Tap | None, entry: name_map.Entry | None) -> int:
        """How many values a tensor may have."""
        n = len(self.context.tokens)
        if tap is not None and entry is not None:
            return 2 * name_map.most_values(None, tap, entry, self.model, n)  # a vocabulary may be padded
        return max(n * n * self.model.sizes["head"], *(math.prod(shape_of(each, n, self.model.sizes))
                                                       for each in self.model.taps))  # fmt: skip

    def _right(self, wanted: str, tap: Tap | None, start: int, rows: int) -> Array | None:
        """llama.cpp's values of a tap in a step, where a map leaves the axes in order."""
        baseline = self.context.baseline
        if tap is None or baseline is None or wanted not in baseline:
            return None
        return baseline[wanted].take(range(start, start + rows), axis=tap.row_axis) if not tap.causal else None

    def _pieces(self, tensor: _Tensor) -> Iterator[Piece]:
        """What was read of it, the steps one after the other."""
        if not tensor.steps:
            return
        rows = self.steps.rows
        whole = len(tensor.steps) == len(rows)
        shapes = [tensor.steps[number].shape for number in sorted(tensor.steps)]
        axis = _row_axis(shapes, [rows[number] for number in sorted(tensor.steps)])
        if tensor.row is not None:
            for number, array in tensor.steps.items():
                yield Piece(tensor.name, array, self.steps.starts[number] + tensor.row % rows[number])
        elif len(rows) == 1:
            yield Piece(tensor.name, tensor.steps[0])
        elif whole and axis is not None:
            yield Piece(tensor.name, _in_one(list(tensor.steps.values()), axis, tensor.known))
        elif tensor.known is not None:
            yield self._some_of(tensor, *tensor.known)

    def _some_of(self, tensor: _Tensor, tap: Tap, entry: name_map.Entry) -> Piece:
        """A tap of which not all values are to be had, in its own shape."""
        shape = shape_of(tap, len(self.context.tokens), self.model.sizes)
        values, there = np.zeros(shape, np.float32), np.zeros(shape, bool)
        for number, array in tensor.steps.items():
            start, rows = self.steps.starts[number], self.steps.rows[number]
            own = rows if rows in array.shape else 1
            if own < rows and not is_last_alone(tap):
                continue
            keys = start + rows if tap.causal else own
            is_square = not tap.causal or keys == rows
            fitted = name_map.fit_to_tap(array, tap, entry, self.model, own) if is_square else array
            place = [slice(None)] * len(shape)
            place[tap.row_axis] = slice(start + rows - own, start + rows)
            if tap.causal:
                place[-1] = slice(0, fitted.shape[-1])
            values[tuple(place)] = fitted
            there[tuple(place)] = True
        indices = np.flatnonzero(there)
        return Piece(tensor.name, values.reshape(-1)[indices], None, indices)

    # -- what is said of it --------------------------------------------------------------------------------------------

    def _joined(self, tensor: _Tensor) -> Joined:
        assert tensor.known is not None
        tap, entry = tensor.known
        owners = None
        for number, each in tensor.owners.items():
            rows = self.steps.rows[number]
            if rows in each.shape and not tap.causal and each.size == math.prod(shape_of(tap, rows, self.model.sizes)):
                owners = np.moveaxis(_fit(each, tap, entry, self.model, rows), tap.row_axis, 0)[0]
        sums: dict[int, Array] = {}
        added = self.ranks.added.get(tap.name, [])
        if len(added) == len(self.steps.names):
            sums = {rank: np.concatenate([each[rank].reshape(self.steps.rows[number], -1)
                                          for number, each in enumerate(added)]) for rank in added[0]}  # fmt: skip
        return Joined(owners, sums)

    def _faults(self) -> tuple[str, ...]:
        fault = self.ranks.fault
        if self.is_auto:
            return (fault,) if fault else ()
        after = "each goes on with its own from there, so what comes after is left out, as if it was not recorded"
        return (f"{fault}; {after}",) if fault else ()

    def _notes(self) -> Iterator[str]:
        """How the dump was read."""
        said, ranks, rows = [], self.ranks, self.steps.rows
        if len(ranks.numbers) > 1:
            by_axis: dict[int, list[str]] = {}
            for name, axis in ranks.joined.items():
                by_axis.setdefault(axis, []).append(name)
            ways = [f"{_words(names)} {'along' if number else 'split along'} axis {axis}"
                    for number, (axis, names) in enumerate(sorted(by_axis.items()))]  # fmt: skip
            ways += [f"{_words(ranks.added)} summed"] if ranks.added else []
            ways = [] if self.is_auto else ways  # what is what, the values are still to tell
            said.append(f"{len(ranks.numbers)} ranks{': ' if ways else ''}{', '.join(ways)}")
        if len(rows) > 1 or self.steps.others:
            steps = f"{len(rows)} steps of {_run_lengths(rows)}" if len(rows) > 1 else f"a step of {rows[0]}"
            said.append(f"{steps} tokens" + (f" ({_not_read(self.steps.others)})" if self.steps.others else ""))
        if said:
            yield f"read as {'; '.join(said)}"


def _in_rows(shape: tuple[int, ...], rows: int, tap: Tap | None) -> tuple[int, ...]:
    """The shape of values that lie in a file one after the other, which states none."""
    is_flat = tap is not None and tap.row_axis == 0 and len(shape) == 1 and shape[0] > rows and shape[0] % rows == 0
    return (rows, shape[0] // rows) if is_flat else shape


def _overlap(some: Mapping[Step, Mapping[int, Unread]], others: Mapping[Step, Mapping[int, Unread]]) -> bool:
    """Whether a rank has a tensor twice in a step."""
    return any(some[step].keys() & by_rank.keys() for step, by_rank in others.items() if step in some)


def _along(plan: Plan, arrays: Mapping[int, Array]) -> Array:
    """Parts one after the other, of ranks with the same part the first one's."""
    whole = np.concatenate(list(arrays.values())[:: plan.copies], axis=plan.axis)
    return whole.take(range(plan.length), axis=plan.axis) if plan.length else whole


def _fit(values: Array, tap: Tap, entry: name_map.Entry, model: Runnable, rows: int) -> Array:
    """What is said of a tensor's values, in the tap's shape: nothing is done to it but what moves values."""
    moved = tuple(each for each in entry.done if each in ("permuted", "paired"))
    flags = np.asarray(values, np.float32)
    fitted = name_map.fit_to_tap(flags, tap, replace(entry, done=moved), model, rows)
    return fitted.astype(values.dtype)


def _row_axis(shapes: Sequence[tuple[int, ...]], rows: Sequence[int]) -> int | None:
    """The axis along which all tensors have as many as their step has tokens."""
    axes = range(min(map(len, shapes)))
    return next((axis for axis in axes if all(s[axis] == n for s, n in zip(shapes, rows, strict=True))), None)


def _in_one(arrays: Sequence[Array], axis: int, known: Known) -> Array:
    """Steps one after the other; of scores, those of keys that came later are none."""
    if known is None or known[0].causal:
        most = [max(sizes) for sizes in zip(*(each.shape for each in arrays), strict=True)]
        arrays = [np.pad(each, [(0, 0 if a == axis else n - each.shape[a]) for a, n in enumerate(most)])
                  for each in arrays]  # fmt: skip
    return np.concatenate(list(arrays), axis=axis)


def _not_read(count: int) -> str:
    return f"{count} more {'was' if count == 1 else 'were'} not read"


def _run_lengths(rows: Sequence[int]) -> str:
    """``5, 1, 1``; of many the first and how many there are."""
    return ", ".join(map(str, rows[:6])) + (", ..." if len(rows) > 6 else "")


def _words(names: Iterable[str]) -> str:
    """Kinds of taps, each once; of many the first and how many there are."""
    words = list(dict.fromkeys(map(stem, names)))
    return ", ".join(words[:FEW]) + (f" and {len(words) - FEW} more" if len(words) > FEW else "")
