"""What an injection is, the run it is for, and what several families of them have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from proof.strangers.engine import Array, Bug, Edit, Engine

TOKENS = (1, 17, 5, 80, 42, 9, 33, 64, 5, 2, 71, 28)
DECODE = 4  # the last tokens, of injections that only go wrong in decode steps
DENSE = ("llama", "qwen2", "qwen3")
EVERY = (*DENSE, "stablelm", "moe")
# places that not every arithmetic has: an engine that never keeps scores cannot take the softmax over the wrong axis,
# and where the scale is folded into Q, a scale that is missing is missing in another op
SAME = "the same"  # in other architectures it has the same name
SCALE, SCORES, NORM_WEIGHTS, OWN_PAIRS = "scale", "scores", "norm weights", "own pairs"

# known bugs of heads that draft, which tests/ext/heads injects
OF_HEADS = frozenset({
    "embedding-from-other-table", "halves-in-other-order", "head-other", "hidden-state-of-other-token",
    "hidden-state-rounded", "joined-after-a-norm", "joined-elsewhere", "refused-draft-kept",
})  # fmt: skip


@dataclass(frozen=True)
class Injection(Bug):
    """A known mistake (``cause``) as somebody's engine would make it, on small models and types of weights.

    ``words`` are the taps it falsifies, first the one to be named, at ``layer`` (or outside the layers).
    ``decode``: how many of the last tokens are decode steps. A ``choice`` is legal: what it falsifies cancels.
    ``says``: of a way of computing that is no mistake, what the report says of each tap that it changes.
    ``others``: the known bugs that describe it in architectures that llama.cpp's graph judges (proof/unseen), written
    down from what it is, before anything was run; of none it is not asked there. ``unlike``: architectures where it is
    no mistake, or another. Without ``models`` it is for those architectures alone.
    """

    cause: str = ""
    words: tuple[str, ...] = ()
    models: tuple[str, ...] = ("llama",)
    kinds: tuple[str, ...] = ("F16", "Q8_0")
    decode: int = 0
    layer: int = 0
    choice: bool = False
    says: str = ""
    others: frozenset[str] = frozenset()
    unlike: tuple[str, ...] = ()

    @property
    def harmless(self) -> bool:
        return bool(self.says)


def bug(
    name: str, cause: str, words: tuple[str, ...], edits: Mapping[str, Edit] | None = None, *,
    models: tuple[str, ...] = ("llama",), kinds: tuple[str, ...] = ("F16", "Q8_0"), decode: int = 0, layer: int = 0,
    choice: bool = False, says: str = "", needs: Iterable[str] = (), others: str = "", unlike: tuple[str, ...] = (),
    **faults: Edit,
) -> Injection:  # fmt: skip
    """An injection: ops as it has them, or values that pass taps."""
    names = frozenset((cause if others == SAME else others).split())
    return Injection(name, edits or {}, faults, frozenset(needs), cause, words, models, kinds, decode, layer, choice,
                     says, names, unlike)  # fmt: skip


def elsewhere(
    name: str, others: str, edits: Mapping[str, Edit] | None = None, *, decode: int = 0, unlike: tuple[str, ...] = (),
    **faults: Edit,
) -> Injection:  # fmt: skip
    """An injection for architectures that llama.cpp's graph judges, alone."""
    return bug(name, "", (), edits, models=(), decode=decode, others=others, unlike=unlike, **faults)


def together(*bugs: Bug) -> Bug:
    """Several bugs at once, of different ops."""
    edits = {op: edit for bug in bugs for op, edit in bug.edits.items()}
    assert len(edits) == sum(len(bug.edits) for bug in bugs)
    return Bug(" + ".join(bug.name for bug in bugs), edits)


def at(words: Iterable[str], fault: Edit) -> dict[str, Edit]:
    return dict.fromkeys(words, fault)


def wide(function: Callable[..., Array], *arrays: Array) -> Array:
    """A function in float64."""
    return np.asarray(function(*(array.astype(np.float64) for array in arrays)), arrays[0].dtype)


def to_halves(x: Array) -> Array:
    """Values of each head [..., dim] from (2i, 2i+1) to (i, i + dim / 2)."""
    return np.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)


def to_pairs(x: Array) -> Array:
    out = np.empty_like(x)
    out[..., 0::2], out[..., 1::2] = np.split(x, 2, axis=-1)
    return out


def row_before(x: Array) -> Array:
    return x[np.maximum(np.arange(len(x)) - 1, 0)]


def row_late(x: Array) -> Array:
    return np.concatenate([np.zeros_like(x[:1]), x[:-1]])


def in_other_layer(e: Engine, right: Edit, stem: str) -> Any:
    """What an op gives in the layer after, of the last one in the one before; its own where that has no such tensor."""
    own = e.layer
    e.layer = own + 1 if own + 1 < e.h.layers else own - 1
    try:
        if e.stores(stem):
            return right(stem)
    finally:
        e.layer = own
    return right(stem)


def swapping(one: str, other: str) -> Callable[[str], str]:
    return lambda stem: {one: other, other: one}.get(stem, stem)


def projected(e: Engine, side: str) -> Array:
    """Q or K heads as they are before RoPE."""
    word = f"{side}cur_normed" if f"{side}cur_normed-{e.layer}" in e.seen else f"{side}cur_proj"
    return e.here(word).reshape(len(e.positions), -1, e.h.dim)


def read_as(source: Callable[[Engine], Array | None]) -> dict[str, Edit]:
    """Scores of other K than the cache has: source(engine) of each batch, or none where it is as it should be."""

    def read_keys(e: Engine, right: Edit, rows: Array) -> Array:
        other, place = source(e), ("read", e.layer)
        if other is None:
            return right(rows)
        other = e.a.keys(other)
        e.caches[place] = np.concatenate([e.caches[place], other]) if e.start else other
        return right(e.caches[place])

    return {"read_keys": read_keys}
