"""The KV cache goes wrong: rows, layers, layout, and what decode steps see of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from proof.unseen.bugs.bug import bug
from proof.unseen.engine import Engine

ROOM = 10  # rows of a cache that is too short


def _read(change: Callable[[Any], Any], sides: str = "kv") -> Callable[..., Any]:
    """The cache is kept as it should, and read otherwise."""
    return lambda e, side, rows: (change if side in sides else np.asarray)(Engine.cached(e, side, rows))


def _before(x: Any) -> Any:
    return x[np.maximum(np.arange(len(x)) - 1, 0)]


def _late(x: Any) -> Any:
    return np.concatenate([np.zeros_like(x[:1]), x[:-1]])


def _early(x: Any) -> Any:
    return np.concatenate([x[1:], np.zeros_like(x[:1])])


def _first_layers(e: Engine, side: str, rows: Any) -> Any:
    """Every layer reads what the first layer that has a cache wrote."""
    own = Engine.cached(e, side, rows)
    first = min(layer for name, layer in e.kept if name == side)
    return e.kept[side, first] if e.kept[side, first].shape == own.shape else own


def _over_each_other(place: int) -> Callable[..., Any]:
    """Every decode step writes into one slot; those behind the prompt stay empty."""

    def cached(e: Engine, side: str, rows: Any) -> Any:
        own = np.array(Engine.cached(e, side, rows))
        if not e.decoding:
            return own
        slot = e.n_prefill if place < 0 else place
        newest, own[e.n_prefill :] = own[-1].copy(), 0
        own[slot] = newest
        return own

    return cached


def _again(e: Engine, q: Any, keys: Any) -> Any:
    """K is rotated when it is written, and when it is read."""
    if e.arch.positions not in ("pairs", "halves") or e.has("attn_kv_a_mqa"):
        return Engine.scores(e, q, keys)
    at, e.at = e.at, np.arange(len(keys))
    turned, e.at = e.rotated(keys, "K"), at
    return Engine.scores(e, q, turned)


def _own_unseen(e: Engine, q: Any, k: Any) -> Any:
    hidden = Engine.hidden(e, q, k)
    return hidden | (k >= q) if e.decoding else hidden


def _own_alone(e: Engine, q: Any, k: Any) -> Any:
    hidden = Engine.hidden(e, q, k)
    return hidden | (k < q) if e.decoding else hidden


def _by(axes: tuple[int, ...]) -> Callable[[Any], Any]:
    return lambda x: np.ascontiguousarray(x.transpose(axes)).reshape(x.shape)


BUGS = (
    bug("cache: row of the token before", "cache-row-off", cached=_read(_before)),
    bug("cache: keys' row of the token before", "cache-row-off", cached=_read(_before, "k")),
    bug("cache: values' row of the token before", "cache-row-off", cached=_read(_before, "v")),
    bug("cache: written a slot late", "cache-row-off", cached=_read(_late)),
    bug("cache: read a slot early", "cache-row-off", cached=_read(_early)),
    bug("cache: rows of the first layer", "cache-of-another-layer", cached=_first_layers),
    bug("cache: steps over each other", "cache-overwritten", True, cached=_over_each_other(-1)),
    bug("cache: steps over slot 0", "cache-overwritten", True, cached=_over_each_other(0)),
    bug("cache: K rotated again", "cache-rotated-again", scores=_again),
    bug("cache: V by head", "cache-transposed", cached=_read(_by((1, 0, 2)), "v")),
    bug("cache: steps do not see themselves", "decode-key-unseen", True, hidden=_own_unseen,
        unlike=("gemma3", "gpt-oss")),
    bug("cache: steps see only themselves", "decode-key-unseen", True, hidden=_own_alone),
)  # fmt: skip
