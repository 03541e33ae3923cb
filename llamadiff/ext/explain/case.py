"""A case: one tap of one layer, the values that its op was given, and what the candidate made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from llamaref import Engine
from llamaref.config import Config
from numpy.typing import NDArray

from llamadiff.engines.model_file import Runnable
from llamadiff.ext.explain.budget import Budget
from llamadiff.ext.explain.part import FEWEST, Part, wrong_rows
from llamadiff.numerics import cpu, metrics
from llamadiff.numerics.policies import F32
from llamadiff.numerics.rounding_tap import Carrier
from llamadiff.trace import taps

Array = NDArray[Any]


class NotRecordedError(Exception):
    """A bug's replay needs a tap that was not recorded: the bug cannot be tried."""


class OutOfTimeError(NotRecordedError):
    """The time for a search is over: what is left of it is not tried."""


@dataclass(frozen=True)
class Recording:
    """What all cases of one run share.

    ``edges``: where batches begin, and the end; of the first ``n_prefill`` tokens they are parts of the prompt.
    ``shapes``: tap name -> the engine's shape of it, without the batch; ``known``: tap name -> which values are there;
    ``relative``: those of which each row is known up to a constant.
    """

    model: Runnable
    tokens: tuple[int, ...]
    positions: Array
    edges: tuple[int, ...]
    n_prefill: int
    carrier: Carrier
    shapes: Mapping[str, tuple[int, ...]]
    known: Mapping[str, Array]
    relative: frozenset[str] = frozenset()

    @classmethod
    def in_float32(cls, model: Runnable, tokens: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]]) -> Recording:
        """A prefill that rounds nowhere, and was recorded whole."""
        n = len(tokens)
        return cls(model, tokens, np.arange(n), (0, n), n, Carrier([(F32, {})]), shapes, {})

    @property
    def batches(self) -> list[tuple[int, int]]:
        """The first token of each batch, and that after its last."""
        return list(pairwise(self.edges))

    def shape(self, name: str) -> tuple[int, ...]:
        """The engine's shape of a tap. Raises NotRecordedError for one that nobody judged: scores of a long prompt."""
        try:
            return self.shapes[name]
        except KeyError:
            raise NotRecordedError(name) from None


@dataclass(frozen=True)
class Case:
    """One tap, its inputs by name, and what was recorded.

    ``values`` raises NotRecordedError for inputs that are not there. ``recorded`` is None inside a span. ``channels``
    are the outputs of a product that are looked at (None: all). ``limit`` is the NMSE of a fit, ``slack`` that of a
    harmless one; ``hint`` a constant that fitted elsewhere; ``hurried``: solve for no constants, try the familiar ones.
    ``everywhere``: try bugs in all ops of a kind in a span (True), or in one of them alone (False). ``budget``:
    no graph is computed again once it is spent. ``part``: the rows that are looked at (None: all).
    """

    run: Recording
    tap: taps.Tap
    values: Callable[[str], Array]
    recorded: Array | None
    channels: Array | None = None
    limit: float = 0.0
    slack: float = 0.0
    hint: float | None = None
    hurried: bool = False
    everywhere: bool | None = None
    budget: Budget | None = None
    part: Part | None = None

    def __getitem__(self, word: str) -> Array:
        """The values of another tap of this layer (or outside the layers): [b, token, ...]."""
        layered = taps.BY_WORD[word].layered
        return self.values(f"{word}-{self.tap.layer}" if layered else word)

    @property
    def engine(self) -> Engine:
        engine: Engine = self.run.model.engine
        return engine

    @property
    def by_graph(self) -> bool:
        """Whether the model is run through a recorded graph."""
        return self.run.model.by_graph

    @property
    def config(self) -> Config:
        return self.engine.config

    @property
    def carrier(self) -> Carrier:
        return self.run.carrier

    @cached_property
    def weight(self) -> str | None:
        """The weight tensor of this tap's op."""
        return self.run.model.weight_names.get(self.tap.name)

    @property
    def layer(self) -> int:
        assert self.tap.layer is not None
        return self.tap.layer

    @property
    def n_rows(self) -> int:
        """How many tokens' rows of the tap were recorded."""
        mask = self.run.known.get(self.tap.name)
        return len(self.run.tokens) if mask is None else int(mask.reshape(len(mask), -1).any(axis=1).sum())

    def tap_input(self) -> Array:
        """What this tap's op reads, where it reads one tensor."""
        return self.values(self.run.model.inputs(self.tap)[0])

    def vector(self, name: str) -> Array | None:
        """A small tensor of the file, if it has it."""
        w = self.engine.w
        return w.decode_rows(name, w.read_raw(name)).reshape(-1) if name in w else None

    def of(self, tap: str) -> Case:
        """The case of another tap of this layer, on the same values. Raises NotRecordedError if the model has none."""
        found = next((t for t in self.run.model.taps if t.name == tap), None)
        if found is None:
            raise NotRecordedError(tap)
        return replace(self, tap=found, recorded=None, channels=None)

    def at(self, channels: Array) -> Case:
        """The same case, looking at some of its outputs."""
        return replace(self, channels=channels)

    def nmse(self, x: Array) -> float:
        """How far a result [b, token, ...] is from what was recorded, under the arithmetic that fits a phase best.

        Infinite where nothing that was recorded is finite: NaN is what many mistakes give, and shows none.
        """
        assert self.recorded is not None
        if not np.isfinite(self.recorded).any():
            return float("inf")
        rows, total = self._row_errors(x), np.zeros(2)
        for phase in cpu.phases(self.run.edges, self.run.n_prefill):
            total += min(([error[phase].sum(), size[phase].sum()] for error, size in rows), key=lambda both: both[0])
        value = metrics.ratio(float(total[0]), float(total[1]))
        return value if np.isfinite(value) else float("inf")

    def nmse_between(self, x: Array, other: Array) -> float:
        """How far two results without their batch axis are from each other."""
        error, size = row_errors(self.compared(other), self.compared(x), self.tap.row_axis)
        return float(metrics.ratio(float(error.sum()), float(size.sum())))

    def part_of(self, x: Array) -> Part | None:
        """The rows in which a result [b, token, ...] is not what was recorded, where it is in others."""
        found = Part.of(self.wrong_rows(x), self.run.n_prefill)
        seen = self.compared(x[0])
        width = seen.size // max(1, seen.shape[self.tap.row_axis])
        return found if found is not None and len(found.rows) * width >= FEWEST else None

    def wrong_rows(self, x: Array) -> Array:
        """Which rows no result [b, token, ...] gives."""
        return np.asarray(np.all([wrong_rows(*each, self.limit) for each in self._row_errors(x)], axis=0))

    def first_wrong(self, x: Array) -> int:
        """The first row that no result [b, token, ...] gives; the number of rows if there is none."""
        return int(np.argmax([*self.wrong_rows(x), True]))

    def _row_errors(self, x: Array) -> list[tuple[Array, Array]]:
        """Of each entry of a result, rows' errors and sizes: sums of squares."""
        assert self.recorded is not None
        recorded, axis = self.compared(self.recorded), self.tap.row_axis
        return [row_errors(recorded, self.compared(entry), axis) for entry in x]

    def compared(self, x: Array) -> Array:
        """A result without its batch axis as it is compared with what was recorded, or that itself."""
        return self._looked_at(self._seen(x))

    def _seen(self, x: Array) -> Array:
        """A result as it is compared: shaped like the tap, defined values alone."""
        if self.channels is None:
            x = x.reshape(self.run.shape(self.tap.name))
        if self.tap.kind.word == "kq":
            x = np.where(self.run.positions[None, :] > self.run.positions[:, None], x.dtype.type(0), x)
        if self.tap.kind.op == "ARGSORT" and np.isfinite(x).all():  # by what is chosen; or else by the choice itself
            for word in self.tap.kind.inputs.split("|"):
                with suppress(NotRecordedError):
                    scores = self.values(f"{word}-{self.tap.layer}")[0]
                    return np.asarray(np.take_along_axis(scores, x.astype(np.int64), axis=-1))
        return x

    def _looked_at(self, x: Array) -> Array:
        mask = self.run.known.get(self.tap.name)
        if self.channels is not None:
            x = x if x.shape[-1] == len(self.channels) else x[..., self.channels]
            mask = None if mask is None else mask[..., self.channels]
        x = metrics.where_known(x, mask, self.tap.name in self.run.relative)
        return x if self.part is None else self.part.alone(x, self.tap.row_axis)


def row_errors(candidate: Array, baseline: Array, axis: int) -> tuple[Array, Array]:
    """Per row of ``axis``: sum((c-b)^2) and sum(b^2); of values that are not finite see metrics.Rows.errors."""
    c, b = metrics.Rows(candidate, axis), metrics.Rows(baseline, axis)
    return b.errors(c), b.reference()
