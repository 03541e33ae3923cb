"""The embedding, and how people get it wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.diagnose.case import Case
from llamadiff.diagnose.registry import Change, bug, recipe
from llamadiff.diagnose.sought import ROWS_FACTOR

Array = NDArray[Any]


@dataclass(frozen=True)
class Lookup:
    """Rows of the embedding, times a constant; ``read`` gives rows [n, embd] for their numbers."""

    read: Callable[[Array], Array]
    ids: Array
    factor: float = 1.0

    def compute(self, case: Case) -> Array:
        return (self.read(self.ids) * np.float32(self.factor))[None]


@recipe("embd")
def lookup(case: Case) -> Lookup:
    """The tokens' rows."""
    return Lookup(rows_of(case, "token_embd.weight"), np.asarray(case.run.tokens))


def rows_of(case: Case, name: str) -> Callable[[Array], Array]:
    """Reads rows of a matrix of the file."""
    w = case.engine.w
    return lambda ids: w.decoded(name, w.stored(name, ids))


@bug("embd", fix="look up the row of the token's own id", source="vllm#30424")
def embedding_row_off(r: Lookup, case: Case) -> Iterator[Change]:
    """Embedding rows are off by a constant, or all are one row."""
    last = case.engine.n_vocab - 1
    for shift in (1, -1, 2, -2, 3, -3):
        ids = np.clip(r.ids + shift, 0, last)
        yield Change(replace(r, ids=ids), f"looks up the row of id {shift:+d}", f"{shift:+d}")
    yield Change(
        replace(r, ids=np.full_like(r.ids, r.ids[0])), "looks up the first token's row for every token", "first"
    )
    yield Change(
        replace(r, ids=np.full_like(r.ids, r.ids[-1])), "looks up the last token's row for every token", "last"
    )
    yield Change(replace(r, ids=np.zeros_like(r.ids)), "looks up row 0 for every token", "0")


@bug("embd", fix="read token_embd.weight")
def embedding_from_head(r: Lookup, case: Case) -> Iterator[Change]:
    """Rows are read from the output head instead of the embedding."""
    if "output.weight" in case.engine.w:
        yield Change(replace(r, read=rows_of(case, "output.weight")), "reads rows of output.weight")


@bug(
    "embd",
    fix="token_embd.weight is [vocab, embd]: a token's values are neighbours",
    source="aprender#155, aprender#188",
)
def embedding_transposed(r: Lookup, case: Case) -> Iterator[Change]:
    """The embedding is read as if it were stored [embd, vocab]."""
    w = case.engine.w
    n_vocab, n_embd = w.shape("token_embd.weight")

    def read(ids: Array) -> Array:
        return np.ascontiguousarray(w.whole("token_embd.weight").reshape(n_embd, n_vocab)[:, ids].T)

    yield Change(replace(r, read=read), "reads token_embd.weight transposed")


@bug("embd", fix="leave the rows as they are: this model does not scale them", source="tensai#248")
def embedding_scaled(r: Lookup, case: Case) -> Iterator[Change]:
    """Embeddings are multiplied by sqrt(d), as in Gemma, or divided by it."""
    root = math.sqrt(case.config.n_embd)
    yield Change(replace(r, factor=root), f"multiplies by sqrt({case.config.n_embd}); this model does not", "times")
    yield Change(replace(r, factor=1 / root), f"divides by sqrt({case.config.n_embd}); this model does not", "over")


@bug("embd", general=True, fix="leave the rows as they are: this model does not scale them", source="tensai#248")
def embedding_multiplied(r: Lookup, case: Case) -> Iterator[Change]:
    """Embeddings are multiplied by a constant."""
    if case.recorded is not None:
        x, y = r.compute(case).astype(np.float64).ravel(), case.recorded.astype(np.float64).ravel()
        good = np.isfinite(y)
        factor = float(x[good] @ y[good]) / max(float(x[good] @ x[good]), 1e-300)
        yield Change(replace(r, factor=factor), ROWS_FACTOR.says(factor, 1.0), value=factor)
