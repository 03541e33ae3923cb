"""gemma: Gemma 1. The embedding is scaled by sqrt(n_embd); RoPE in halves, GeGLU."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from llamaref.config import Config, Traits
from llamaref.ffn import geglu

if TYPE_CHECKING:
    from llamaref.engine import Array, Engine, Step
    from llamaref.metadata import Reader


def configure(c: Config, read: Reader) -> Config:
    """The embedding is scaled."""
    return replace(c, embedding_scale=math.sqrt(c.n_embd))


TRAITS = Traits(
    layers="PRE_NORM ATTENTION FFN GEGLU",
    scales_queries=True,
)


def layer(m: Engine, i: int, x: Array, step: Step) -> Array:
    """One block: [b, t, embd] -> [b, t, embd]."""
    tap = step.tap
    h = tap(f"attn_norm-{i}", m.norm(x, f"blk.{i}.attn_norm"))
    q, k, v = m.qkv(h, i, tap)
    q = tap(f"Qcur_rope-{i}", m.ops.rope_halves(q, step.cos, step.sin))
    k = tap(f"Kcur_rope-{i}", m.ops.rope_halves(k, step.cos, step.sin))
    a = m.attention(i, q, k, v, step)  # [b, t, head*dim]
    a = tap(f"attn_out-{i}", m.linear(a, f"blk.{i}.attn_output", tap))
    x = tap(f"ffn_inp-{i}", m.ops.add(a, x))
    h = tap(f"ffn_norm-{i}", m.norm(x, f"blk.{i}.ffn_norm"))
    return tap(f"l_out-{i}", m.ops.add(geglu(m, i, h, tap), x))
