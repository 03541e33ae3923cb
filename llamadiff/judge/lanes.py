"""Lanes: the questions that one engine run answers, and the traces they are about.

A lane is a source of values and an arithmetic. Without a source it runs free. With a trace as its source it
takes every recorded tap from the trace, so what it computes next is judged on the inputs that the trace's own
engine really had. All lanes share the batch axis of the engine, hence one pass over the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.judge.settings import cache_settings, computes_in, settings_of
from llamadiff.numerics import arithmetic, metrics
from llamadiff.numerics.policies import (
    ANGLES,
    BF16,
    COARSE,
    COARSE_ATTENTION,
    COARSE_CACHE,
    F16,
    F32,
    MEASURING,
    NATIVE,
    PERTURBED,
    READ,
    READ_PERTURBED,
    rounding_type,
    sums_of,
)
from llamadiff.numerics.rounding import Rounding
from llamadiff.numerics.types import HALVES
from llamadiff.trace.reader import Trace
from llamadiff.trace.taps import Tap, parse

Array = NDArray[Any]

KEPT = ("kv_k-", "kv_v-")  # taps that may have 16 bits in the engine itself


@dataclass(frozen=True)
class Lane:
    """A source (None: free-running) and an arithmetic policy."""

    source: str | None
    policy: str

    @property
    def is_noise_probe(self) -> bool:
        """Whether it measures noise, and is no arithmetic of its own."""
        return self.policy in MEASURING or self.policy == READ_PERTURBED

    def cache_types(self, sources: Mapping[str, Source]) -> Mapping[str, str]:
        """The types of its cache, and what its CPU does: as its source has them.

        A free run that is not plain float32 measures what rounding does to a run: that of the baseline, and sums in
        float16 if either side has them.
        """
        if self.source is not None or self == FREE:
            return {} if self.source is None else sources[self.source].stored
        sums = next((source.stored["sums"] for source in sources.values() if "sums" in source.stored), None)
        return sources["baseline"].stored | ({"sums": sums} if sums else {})


FREE, FREE_NATIVE = Lane(None, F32), Lane(None, NATIVE)


@dataclass
class Source:
    """A trace under replay: its arithmetics, the types of its cache.

    ``halves`` are taps that its file keeps in 16 bits: its engine may have gone on with finer values. ``products``: the
    precision that its products are kept in, those that it does not record and those that get a bias too.
    ``sparse``: so many are unrecorded that what float32 itself leaves is worth measuring, in so many ``draws``.
    ``reading``: its roundings by kind of operand, where they were read back from it.
    """

    name: str
    trace: Trace
    policies: Sequence[str]
    stored: dict[str, str]  # cache_k, cache_v -> type; q8 -> how it is rounded to
    flash_attn: bool = False
    precision: str = F32
    products: str = F32
    halves: frozenset[str] = frozenset()
    sparse: bool = False
    draws: int = 1
    reading: Mapping[str, Rounding] = field(default_factory=dict)

    @classmethod
    def of(
        cls, name: str, trace: Trace, weight_types: Iterable[str], policies: Sequence[str], taps: Iterable[Tap] = ()
    ) -> Source:
        """A trace of a model with these ``taps``, and what its producer says of its settings."""
        stored, flash = cache_settings(trace), bool(settings_of(trace).get("flash_attn"))
        missing = any(tap.name not in trace for tap in taps if not tap.kind.optional)
        policies = policies_for(weight_types, stored, (*policies, *filter(None, [computes_in(trace)])))
        halves = frozenset(name for name, kind in trace.dtypes.items() if kind in HALVES and not name.startswith(KEPT))
        products = [tap.name for tap in taps if tap.name in trace and tap.kind.op.startswith("MUL_MAT")]
        kept_in = (F32, F32) if trace.is_float32 else (_precision(trace, list(trace)[1:]), _precision(trace, products))
        return cls(name, trace, policies, stored, flash, *kept_in, halves, missing)

    @property
    def lanes(self) -> list[Lane]:
        """Those that its taps are judged by; none for a trace that keeps no tensors."""
        if self.trace.sketch is not None:
            return []
        read = [READ, READ_PERTURBED] if self.reading else []
        perturbed = [*PERTURBED[: self.draws]] if self.sparse or self.is_rough else []
        perturbed += [COARSE, COARSE_CACHE, COARSE_ATTENTION] if self.sparse else []
        return [Lane(self.name, policy) for policy in (*self.policies, *read, *perturbed)]

    @property
    def is_rough(self) -> bool:
        """Whether some of its taps show no more than 16 bits of what the engine had, or products have no more."""
        return not self.precision == self.products == F32 or bool(self.halves)

    def shown_in(self, name: str) -> str:
        """Storage precision of a recorded tap; of one that is unrecorded, what the engine computed it in."""
        if name not in self.trace:
            tap = parse(name)
            return self.products if tap is not None and self.multiplies(tap) else F32
        return self.precision_of(name) if self.precision != F32 or name in self.halves else F32

    def multiplies(self, tap: Tap) -> bool:
        """Whether a tap is a product: the sum of experts' results is none, where these were recorded."""
        sums = tap.kind.word == "ffn_out" and f"ffn_moe_down-{tap.layer}" in self.trace
        return tap.kind.op.startswith("MUL_MAT") and not sums

    def is_whole(self, name: str) -> bool:
        """Whether a tap was recorded in full: only such a tap can stand in for the op's result."""
        return name in self.trace and name not in self.trace.known

    def precision_of(self, name: str) -> str:
        """What a tap's values were kept in; float32 for one that was not recorded."""
        if name not in self.trace:
            return F32
        return self.trace.kept.get(name) or arithmetic.precision(self.trace[name])

    def whole_rows(self, name: str) -> Array | None:
        """Which tokens' rows of a partial tap are complete; None for a tap that is whole, or attention scores."""
        mask = self.trace.known.get(name)
        return None if mask is None else np.asarray(mask.reshape(len(mask), -1).all(axis=1))

    def rows_with_values(self, name: str) -> Array | None:
        """Which tokens' rows of a partial tap have any; None for a tap that is whole."""
        mask = self.trace.known.get(name)
        return None if mask is None else np.asarray(mask.reshape(len(mask), -1).any(axis=1))

    def zero_unrecorded(self, name: str, x: Array) -> Array:
        """A tap's values with those that the trace does not have set to zero."""
        return metrics.where_known(x, self.trace.known.get(name), name in self.trace.printed.relative)


def policies_for(kinds: Iterable[str], stored: Mapping[str, str], wanted: Sequence[str]) -> list[str]:
    """The wanted policies that differ from one another on these weight types."""
    kept: dict[tuple[str, ...], str] = {}
    kinds = [*sorted(kinds), ANGLES]
    for policy in wanted:
        signature = tuple(word for kind in [*kinds, *stored]
                          for word in (rounding_type(policy, kind, stored), sums_of(policy, kind, stored)))  # fmt: skip
        kept.setdefault(signature, policy)
    return list(kept.values())


def _precision(trace: Trace, names: Iterable[str]) -> str:
    """The coarsest precision that a trace keeps a quarter of these taps in.

    Taps that are zero, or not finite, do not count: any precision holds those.
    """
    first = {name: trace[name].reshape(-1)[: arithmetic.SAMPLE] for name in names if trace[name].dtype.kind == "f"}
    telling = {name: some for name, some in first.items() if np.isfinite(some).all() and some.any()}
    kept = [trace.kept.get(name) or arithmetic.precision(some) for name, some in telling.items()]
    return next((kind for kind in (BF16, F16) if kept.count(kind) > len(kept) / 4), F32)
