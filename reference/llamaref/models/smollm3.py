"""smollm3: SmolLM 3. RoPE in pairs, none in every fourth layer, SwiGLU."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from llamaref.config import Config, Traits
from llamaref.ffn import swiglu

if TYPE_CHECKING:
    from llamaref.engine import Array, Engine, Step
    from llamaref.metadata import Reader


def configure(c: Config, read: Reader) -> Config:
    """Every fourth layer is without RoPE (llama.cpp, n_no_rope_layer_step)."""
    return replace(c, ropes=tuple(None if i % 4 == 3 else rope for i, rope in enumerate(c.ropes)))


TRAITS = Traits(
    layers="PRE_NORM ATTENTION FFN SWIGLU",
    rope_pairs=True,
)


def layer(m: Engine, i: int, x: Array, step: Step) -> Array:
    """One block: [b, t, embd] -> [b, t, embd]."""
    c, tap = m.config, step.tap
    h = tap(f"attn_norm-{i}", m.norm(x, f"blk.{i}.attn_norm"))
    q, k, v = m.qkv(h, i, tap)
    if c.ropes[i] is not None:
        q = tap(f"Qcur_rope-{i}", m.ops.rope_pairs(q, step.cos, step.sin))
        k = tap(f"Kcur_rope-{i}", m.ops.rope_pairs(k, step.cos, step.sin))
    a = m.attention(i, q, k, v, step)  # [b, t, head*dim]
    a = tap(f"attn_out-{i}", m.linear(a, f"blk.{i}.attn_output", tap))
    x = tap(f"ffn_inp-{i}", m.ops.add(a, x))
    h = tap(f"ffn_norm-{i}", m.norm(x, f"blk.{i}.ffn_norm"))
    return tap(f"l_out-{i}", m.ops.add(swiglu(m, i, h, tap), x))
