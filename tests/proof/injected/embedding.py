"""The embedding, learned positions and the scale of logits are read wrongly."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from proof.injected.base import DECODE, DENSE, SAME, bug, elsewhere
from proof.strangers.engine import Array, Edit, Engine

WORDS = ("embd",)


def rows_of(choose: Callable[[Array, int], Array]) -> dict[str, Edit]:
    return {"embed": lambda e, right, tokens: right(choose(tokens, len(e.file["token_embd.weight"])))}


def table_of(e: Engine, tensor: Array, tokens: Array) -> Array:
    return e.a.weights(tensor.astype(e.a.dtype))[tokens]


def not_normed(e: Engine, right: Edit, x: Array, stem: str) -> Array:
    return x if stem == "token_embd_norm" and e.h.arch.positions == "alibi" else right(x, stem)


def learned_at(change: Callable[[Array], Array]) -> dict[str, Edit]:
    return {"learned": lambda e, right, at: right(change(at))}


def learned_in_steps(change: Callable[[Array, int], Array]) -> dict[str, Edit]:
    return {"learned": lambda e, right, at: right(np.where(at < e.n_prefill, at, change(at, e.n_prefill)))}


def with_positions(formula: Callable[[Array, Array], Array]) -> dict[str, Edit]:
    return {"with_positions": lambda e, right, x, positions: formula(x, positions)}


RESTARTED = "rope-position-restarted embedding-row-off"
INJECTIONS = (
    bug("embedding: next row", "embedding-row-off", WORDS, rows_of(lambda t, n: (t + 1) % n), models=DENSE,
        others=SAME),
    bug("embedding: row before", "embedding-row-off", WORDS, rows_of(lambda t, n: (t - 1) % n)),
    bug("embedding: three added tokens", "embedding-row-off", WORDS, rows_of(lambda t, n: (t + 3) % n), others=SAME),
    bug("embedding: row 0 for all", "embedding-row-off", WORDS, rows_of(lambda t, n: t * 0), others=SAME),
    bug("embedding: first token for all", "embedding-row-off", WORDS, rows_of(lambda t, n: t * 0 + t[0]), others=SAME),
    bug("embedding: last token for all", "embedding-row-off", WORDS, rows_of(lambda t, n: t * 0 + t[-1])),
    bug("embedding: the next token's", "embedding-of-other-token", WORDS, rows_of(lambda t, n: np.append(t[1:], t[-1])),
        models=DENSE, others=SAME),
    bug("embedding: the token before's", "embedding-of-other-token", WORDS,
        rows_of(lambda t, n: np.append(t[:1], t[:-1])), others=SAME),
    bug("embedding: head's rows", "embedding-from-head", WORDS,
        {"embed": lambda e, right, t: table_of(e, e.file[f"{e.head_stem()}.weight"], t)}, models=DENSE, others=SAME),
    bug("embedding: transposed", "embedding-transposed", WORDS,
        {"embed": lambda e, right, t: table_of(e, e.file["token_embd.weight"].reshape(e.h.embd, -1).T, t)},
        models=DENSE, others=SAME),
    bug("embedding: times sqrt(d)", "embedding-scaled", WORDS, models=DENSE,
        others="embedding-scaled multiplier-missing multiplier-other", embd=lambda e, x: x * math.sqrt(e.h.embd)),
    bug("embedding: times 12", "embedding-multiplied", WORDS, models=DENSE, embd=lambda e, x: x * 12),
    bug("embedding: divided by sqrt(d)", "embedding-scaled", WORDS, embd=lambda e, x: x / math.sqrt(e.h.embd)),
    bug("embedding: times 0.22", "embedding-multiplied", WORDS, others="embedding-multiplied multiplier-other",
        embd=lambda e, x: x * 0.22),
    bug("embedding: negated", "embedding-multiplied", WORDS, embd=lambda e, x: -x),
    elsewhere("embedding: its factor left out", "multiplier-missing embedding-scaled",
              {"embedding_scale": lambda e, right: 1.0}),
    elsewhere("embedding: not normalised", "norm-missing", {"norm": not_normed}),
    elsewhere("positions: from 1", "embedding-row-off", learned_at(lambda at: at + 1)),
    elsewhere("positions: from 2, as in OPT", "embedding-row-off", learned_at(lambda at: at + 2)),
    elsewhere("positions: all 0", "embedding-row-off", learned_at(lambda at: 0 * at)),
    elsewhere("positions: not added", "branch-missing", with_positions(lambda x, p: x)),
    elsewhere("positions: alone", "residual-missing", with_positions(lambda x, p: p)),
    elsewhere("positions: added twice", "residual-doubled", with_positions(lambda x, p: x + 2 * p)),
    elsewhere("positions: restart in steps", RESTARTED, learned_in_steps(lambda at, n: at - n), decode=DECODE),
    elsewhere("positions: steps lag by one", RESTARTED, learned_in_steps(lambda at, n: at - 1), decode=DECODE),
    elsewhere("logits: their factor left out", "multiplier-missing", {"logit_scale": lambda e, right: 1.0}),
    elsewhere("logits: multiplied, not divided", "multiplier-missing multiplier-other",
              {"logit_scale": lambda e, right: 1 / right()}),
    elsewhere("logits: halved", "product-multiplied multiplier-other", {"head": lambda e, right, y: right(y) / 2}),
)  # fmt: skip
