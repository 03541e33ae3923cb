"""phi3: Phi 3 to 4. RoPE in halves with factors by context length (LongRoPE), SwiGLU with gate and up in one matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llamaref.config import Config, Traits

if TYPE_CHECKING:
    from llamaref.engine import Array, Engine, Step, Tap
    from llamaref.metadata import Reader


def configure(c: Config, read: Reader) -> Config:
    """llama.cpp reads the length of a window and does not heed it (src/models/phi3.cpp)."""
    read.count("attention.sliding_window", 0)
    return c


TRAITS = Traits(
    layers="PRE_NORM ATTENTION FFN FUSED_GATE SWIGLU",
    long_rope=True,
    scales_queries=True,
    keys="attention.sliding_window",
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
    return tap(f"l_out-{i}", m.ops.add(ffn(m, i, h, tap), x))


def ffn(m: Engine, i: int, h: Array, tap: Tap) -> Array:
    """down(silu(gate(h)) * up(h)): [b, t, embd] -> [b, t, embd]."""
    g, u = np.split(tap(f"ffn_up-{i}", m.linear(h, f"blk.{i}.ffn_up", tap)), 2, axis=-1)  # [b, t, ff] each
    a = tap(f"ffn_swiglu-{i}", m.ops.swiglu(g, u))
    return tap(f"ffn_out-{i}", m.linear(a, f"blk.{i}.ffn_down", tap))
