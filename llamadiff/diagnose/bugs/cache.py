"""The KV cache at taps: what its faults make of scores, of sums, of what is seen, and of the rows themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.diagnose import cache_faults
from llamadiff.diagnose.bugs.attention import BOTH, PUT_IN, Scores, Values, as_cached
from llamadiff.diagnose.bugs.embedding import Lookup
from llamadiff.diagnose.bugs.norms import Same
from llamadiff.diagnose.bugs.rope import rope_on
from llamadiff.diagnose.bugs.softmax import Softmax
from llamadiff.diagnose.cache_faults import Fault, States, several, unread
from llamadiff.diagnose.case import Case, NotRecordedError, Recording
from llamadiff.diagnose.registry import Change, Recipe, bug
from llamadiff.numerics.arithmetic import ROUNDINGS, fits_blocks
from llamadiff.numerics.types import CACHE_TYPES

Array = NDArray[Any]
KEPT, SEEN = ("kv_k", "kv_v"), ("kq_soft_max",)


@dataclass(frozen=True)
class Read:
    """An attention op on a cache that each batch reads in a state of its own; slots that are not read give zero."""

    op: Scores | Values
    states: States

    def compute(self, case: Case) -> Array:
        batches = zip(case.run.batches, self.states(self.op.rows), strict=True)
        if isinstance(self.op, Scores):
            return np.concatenate([self._scores(case, *batch, rows) for batch, rows in batches], axis=2)
        return np.concatenate([self._mixed(case, *batch, rows) for batch, rows in batches], axis=1)

    def _scores(self, case: Case, start: int, stop: int, rows: Array) -> Array:
        assert isinstance(self.op, Scores)
        scores = replace(self.op, q=self.op.q[:, start:stop], rows=rows).compute(case)
        return np.pad(scores, ((0, 0), (0, 0), (0, 0), (0, len(case.run.tokens) - rows.shape[1])))

    def _mixed(self, case: Case, start: int, stop: int, rows: Array) -> Array:
        assert isinstance(self.op, Values)
        return replace(self.op, probs=self.op.probs[:, :, start:stop, : rows.shape[1]], rows=rows).compute(case)


def _faulty(r: Any, case: Case, faults: Iterable[Fault]) -> Iterator[Change]:
    """What caches with a fault make of a tap: scores, sums, which keys are seen, or the rows themselves."""
    for fault in faults:
        says, variant, value = fault.says, fault.variant, fault.value
        if isinstance(r, Softmax):
            hidden = unread(fault.states, case.run)
            if hidden.any():
                yield Change(replace(r, hidden=r.hidden | hidden), says, variant, value)
        elif isinstance(r, Same):
            rows = _put_in(case, case.layer)
            *_, last = fault.states(rows)
            yield Change(Same(_padded(last, rows.shape[1])), says, variant, value)
        elif _agrees(fault.states, case):
            yield Change(Read(replace(r, rows=_put_in(case, case.layer)), fault.states), says, variant, value)


def _agrees(states: States, case: Case) -> bool:
    """Whether no probability that was recorded belongs to a slot that is not read."""
    hidden = unread(states, case.run)
    if not hidden.any():
        return True
    try:
        return not bool(np.asarray(case["kq_soft_max"])[..., hidden].any())
    except NotRecordedError:
        return True


def _put_in(case: Case, layer: int) -> Array:
    """The rows that go into the cache, of this layer or another one: [b, s, kv_head, dim]."""
    side = "k" if case.tap.kind.word in ("kq", "kv_k") else "v"
    return as_cached(case, side, case.values(f"{PUT_IN[side]}-{layer}"))


def _padded(rows: Array, count: int) -> Array:
    return np.pad(rows, ((0, 0), (0, count - rows.shape[1]), (0, 0), (0, 0)))


@dataclass(frozen=True)
class TapLayer:
    """A cache_faults.Kept: the layer of a tap."""

    case: Case
    recipe: Recipe

    @property
    def run(self) -> Recording:
        return self.case.run

    @property
    def layer(self) -> int:
        return self.case.layer

    def put_in(self, layer: int) -> Array:
        return _put_in(self.case, layer)

    def rotated(self, rows: Array) -> Array:
        turned = rope_on(self.case, rows)
        return replace(turned, positions=turned.positions[: rows.shape[1]]).compute(self.case)

    def unrotated(self) -> Array:
        normed = f"Kcur_normed-{self.layer}" in self.run.shapes
        return as_cached(self.case, "k", self.case["Kcur_normed" if normed else "Kcur_proj"])

    def first_wrong(self) -> int | None:
        if self.case.recorded is None or self.case.tap.kind.word in KEPT:
            return None
        return self.case.first_wrong(self.recipe.compute(self.case))


@bug(*BOTH, *KEPT, fix="write K and V of a token into the slot that attention reads for it", source="tiny-llm#46")
def cache_row_off(r: Scores | Values | Same, case: Case) -> Iterator[Change]:
    """The cache's rows are off by one, or stale: a token reads the row of the one before it."""
    yield from _faulty(r, case, cache_faults.rows_off(TapLayer(case, r)))


@bug(*BOTH, *KEPT, *SEEN, fix="write each batch's rows behind those that are kept already")
def cache_overwritten(r: Scores | Values | Softmax | Same, case: Case) -> Iterator[Change]:
    """Each batch after the first writes its rows over the same slots."""
    yield from _faulty(r, case, cache_faults.overwritten(TapLayer(case, r)))


@bug(*BOTH, *KEPT, *SEEN, fix="make room for as many rows as there are tokens, or for the context")
def cache_too_short(r: Scores | Values | Softmax | Same, case: Case) -> Iterator[Change]:
    """The cache has fewer rows than there are tokens: rows overwrite others, or are dropped."""
    known = () if case.hint is None else (int(case.hint),)
    yield from _faulty(r, case, cache_faults.too_short(TapLayer(case, r), known))


@bug(*BOTH, *KEPT, "embd", fix="feed every row of a batch once")
def first_row_fed_twice(r: Scores | Values | Same | Lookup, case: Case) -> Iterator[Change]:
    """The first row of a batch is fed twice, so that those after it come one late."""
    if not isinstance(r, Lookup):
        yield from _faulty(r, case, cache_faults.first_row_twice(TapLayer(case, r)))
    elif several(case.run):
        tokens, says = cache_faults.first_token_twice(case.run)
        yield Change(replace(r, ids=r.ids[tokens]), says)


@bug(*BOTH, fix="read the layer's own cache")
def cache_of_another_layer(r: Scores | Values, case: Case) -> Iterator[Change]:
    """Rows of another layer are read: the layer's index is wrong, or all layers share one cache."""
    yield from _faulty(r, case, cache_faults.another_layer(TapLayer(case, r)))


@bug(*BOTH, *SEEN, fix="count a step's own key in before its scores are taken", source="tiny-llm#46")
def decode_key_unseen(r: Scores | Values | Softmax, case: Case) -> Iterator[Change]:
    """Decode steps do not see their own key, or see nothing but it."""
    n, p = case.run.n_prefill, case.run.positions
    if not several(case.run):
        return
    yield from _faulty(r, case, cache_faults.own_key_unseen(TapLayer(case, r)))
    if isinstance(r, Softmax) and 0 < n < len(p):
        alone = r.hidden.copy()
        alone[n:] = p[None, :] != p[n:, None]
        yield Change(replace(r, hidden=alone), "sees only its own key in decode steps: the cache is lost", "alone")
        recent = r.hidden.copy()
        recent[n:, :n] = True
        yield Change(replace(r, hidden=recent), "does not see the prompt in decode steps", "recent")


@bug("kq", fix="rotate K once: before it is put into the cache, or as it is read")
def cache_rotated_again(r: Scores, case: Case) -> Iterator[Change]:
    """K is rotated before it is cached, and again when it is read."""
    yield from _faulty(r, case, cache_faults.rotated_again(TapLayer(case, r)))


@bug("kq", "kv_k", fix="rotate K before it is put into the cache, or when it is read")
def cache_before_rope(r: Scores | Same, case: Case) -> Iterator[Change]:
    """The cache keeps K as it was before RoPE, and nothing rotates it."""
    faults = cache_faults.before_rotation(TapLayer(case, r))
    yield from _faulty(r, case, (fault for fault in faults if isinstance(r, Scores) or fault.variant == "all"))


@bug(*BOTH, fix="read the cache in the layout in which it was written: [token, head, dim]")
def cache_transposed(r: Scores | Values, case: Case) -> Iterator[Change]:
    """The cache is read in another layout than it was written in: tokens, heads and values of a head in disorder."""
    yield from _faulty(r, case, cache_faults.transposed(TapLayer(case, r)))


@dataclass(frozen=True)
class StoredCache:
    """An attention op on a cache kept in another type."""

    op: Scores | Values
    kind: str

    def compute(self, case: Case) -> Array:
        return replace(self.op, rows=ROUNDINGS[self.kind](self.op.rows)).compute(case)


def _types(rows: Array) -> Iterator[str]:
    """The types of fewer bits that a cache of rows [..., dim] may have."""
    return (kind for kind in CACHE_TYPES[1:] if fits_blocks(rows.shape[-1], kind))


@bug(*BOTH, harmless=True, fix="nothing: a cache in fewer bits rounds; state it as producer.settings.type_k")
def cache_rounded(r: Scores | Values, case: Case) -> Iterator[Change]:
    """K and V are kept in a cache of fewer bits."""
    side = "K" if isinstance(r, Scores) else "V"
    for kind in _types(r.rows):
        yield Change(StoredCache(r, kind), f"reads {side} from a cache of type {kind}", kind)


@bug(*KEPT, harmless=True, fix="nothing: a cache in fewer bits rounds this much")
def cache_rows_rounded(r: Same, case: Case) -> Iterator[Change]:
    """The cache's rows are rounded as they are kept."""
    for kind in _types(r.x):
        yield Change(Same(ROUNDINGS[kind](r.x)), f"keeps its rows as {kind}", kind)
