"""The embedding is read wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llamaref import Engine

from proof.injected.base import DENSE, Build, Injection, altered

WORDS = ("embd",)


def _rows(choose: Callable[[Any, int], Any], tensor: str = "token_embd.weight") -> Build:
    """Other rows than the tokens': choose(tokens, vocabulary size)."""

    class Rows(Engine):
        def embed(self, tokens: Any) -> Any:
            return self.w.rows(tensor, choose(tokens, self.n_vocab))[None]

    return Rows


class _Transposed(Engine):
    """Column ``token`` of the tensor taken for [embd, vocab]."""

    def embed(self, tokens: Any) -> Any:
        return self.w.whole("token_embd.weight").reshape(-1, self.n_vocab)[:, tokens].T[None]


INJECTIONS = (
    Injection("embedding: next row", "embedding-row-off", WORDS, _rows(lambda t, n: (t + 1) % n), DENSE),
    Injection("embedding: row before", "embedding-row-off", WORDS, _rows(lambda t, n: (t - 1) % n)),
    Injection("embedding: three added tokens", "embedding-row-off", WORDS, _rows(lambda t, n: (t + 3) % n)),
    Injection("embedding: row 0 for all", "embedding-row-off", WORDS, _rows(lambda t, n: np.zeros_like(t))),
    Injection("embedding: first token for all", "embedding-row-off", WORDS, _rows(lambda t, n: t[:1].repeat(len(t)))),
    Injection("embedding: last token for all", "embedding-row-off", WORDS, _rows(lambda t, n: t[-1:].repeat(len(t)))),
    Injection("embedding: head's rows", "embedding-from-head", WORDS, _rows(lambda t, n: t, "output.weight"), DENSE),
    Injection("embedding: transposed", "embedding-transposed", WORDS, _Transposed, DENSE),
    Injection("embedding: times sqrt(d)", "embedding-scaled", WORDS, altered(embd=lambda x, run: x * 16.0), DENSE),
    Injection("embedding: times 12", "embedding-multiplied", WORDS, altered(embd=lambda x, run: x * 12.0), DENSE),
    Injection("embedding: divided by sqrt(d)", "embedding-scaled", WORDS, altered(embd=lambda x, run: x / 16.0)),
    Injection("embedding: times 0.22", "embedding-multiplied", WORDS, altered(embd=lambda x, run: x * 0.22)),
    Injection("embedding: negated", "embedding-multiplied", WORDS, altered(embd=lambda x, run: -x)),
)
