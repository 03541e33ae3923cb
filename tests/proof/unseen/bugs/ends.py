"""The embedding, learned positions and the head go wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from proof.unseen.bugs.bug import bug
from proof.unseen.engine import Engine


def _rows(change: Callable[[Any, int], Any]) -> Callable[..., Any]:
    return lambda e, tokens: Engine.embedding(e, change(tokens, len(e.file["token_embd.weight"])))


def _times(factor: float) -> Callable[..., Any]:
    return lambda e: factor * Engine.embedding_scale(e)


def _transposed(e: Engine, tokens: Any) -> Any:
    w = e.file["token_embd.weight"]
    return w.reshape(w.shape[::-1])[:, tokens].T


def _logits(change: Callable[[Engine, Any], Any]) -> Callable[..., Any]:
    """Logits of other rows."""
    return lambda e, y: Engine.logits(e, change(e, y).astype(np.float32))


def _capped(cap: float) -> Callable[..., Any]:
    return lambda e, y: cap * np.tanh(Engine.logits(e, y) / cap)


def _in_steps(change: Callable[[Engine, Any], Any]) -> Callable[..., Any]:
    """Learned positions of decode steps."""
    return lambda e, at: Engine.learned(e, change(e, at) if e.decoding else at)


BUGS = (
    bug("embedding: next row", "embedding-row-off", embedding=_rows(lambda t, n: (t + 1) % n)),
    bug("embedding: three added tokens", "embedding-row-off", embedding=_rows(lambda t, n: (t + 3) % n)),
    bug("embedding: row 0 for all", "embedding-row-off", embedding=_rows(lambda t, n: 0 * t)),
    bug("embedding: first token for all", "embedding-row-off", embedding=_rows(lambda t, n: t[:1].repeat(len(t)))),
    bug("embedding: head's rows", "embedding-from-head", embedding=lambda e, t: e.file[f"{e.head()}.weight"][t]),
    bug("embedding: transposed", "embedding-transposed", embedding=_transposed),
    bug("embedding: times sqrt(d)", "embedding-scaled multiplier-missing multiplier-other", embedding_scale=_times(16)),
    bug("embedding: times 0.22", "embedding-multiplied multiplier-other", embedding_scale=_times(0.22)),
    bug("embedding: its factor left out", "multiplier-missing embedding-scaled", embedding_scale=lambda e: 1.0),
    bug("embedding: not normalised", "norm-missing", norm=lambda e, x, stem:
        x if stem == "token_embd_norm" and e.arch.positions == "alibi" else Engine.norm(e, x, stem)),
    bug("positions: from 1", "embedding-row-off", learned=lambda e, at: Engine.learned(e, at + 1)),
    bug("positions: from 2, as in OPT", "embedding-row-off", learned=lambda e, at: Engine.learned(e, at + 2)),
    bug("positions: all 0", "embedding-row-off", learned=lambda e, at: Engine.learned(e, 0 * at)),
    bug("positions: not added", "branch-missing", with_positions=lambda e, x, p: x),
    bug("positions: alone", "residual-missing", with_positions=lambda e, x, p: p),
    bug("positions: added twice", "residual-doubled", with_positions=lambda e, x, p: x + 2 * p),
    bug("positions: restart in steps", "rope-position-restarted embedding-row-off", decode=True,
        learned=_in_steps(lambda e, at: at - e.n_prefill)),
    bug("positions: steps lag by one", "rope-position-restarted embedding-row-off", decode=True,
        learned=_in_steps(lambda e, at: at - 1)),
    bug("head: tied", "head-tied", head=lambda e: "token_embd"),
    bug("logits: their factor left out", "multiplier-missing", logit_scale=lambda e: 1.0),
    bug("logits: multiplied, not divided", "multiplier-missing multiplier-other",
        logit_scale=lambda e: 1 / Engine.logit_scale(e)),
    bug("logits: halved", "product-multiplied multiplier-other", logits=lambda e, y: Engine.logits(e, y) / 2),
    bug("logits: capped at 8", "logits-capped", logits=_capped(8.0)),
    bug("logits: capped at 30", "logits-capped", logits=_capped(30.0)),
    bug("logits: of the first token", "logits-of-other-row", logits=_logits(lambda e, y: y[:1].repeat(len(y), 0))),
    bug("logits: of the token before", "logits-of-other-row",
        logits=_logits(lambda e, y: y[np.maximum(np.arange(len(y)) - 1, 0)])),
    bug("logits: of the residual", "input-elsewhere", logits=_logits(lambda e, y: e.residual)),
)  # fmt: skip
