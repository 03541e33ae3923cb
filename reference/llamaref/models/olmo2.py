"""olmo2: OLMo 2 and 3. RoPE in halves, RMSNorm of whole Q and K rows and after each branch, SwiGLU, windows in some."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from llamaref.config import Config, Traits, Windows
from llamaref.ffn import swiglu

if TYPE_CHECKING:
    from llamaref.engine import Array, Engine, Step
    from llamaref.metadata import Reader


def configure(c: Config, read: Reader) -> Config:
    """Layers with a window have plain RoPE."""
    return c.with_local_rope(replace(c.rope, factor=1.0, yarn=False, attn_factor=1.0))


TRAITS = Traits(
    layers="ATTENTION FFN SWIGLU",
    qk_norm="row",
    windows=Windows(length=0, period=4),
)


def layer(m: Engine, i: int, x: Array, step: Step) -> Array:
    """One block: [b, t, embd] -> [b, t, embd]."""
    c, tap = m.config, step.tap
    b, t, _ = x.shape
    cos, sin = step.angles[c.ropes[i]]
    q, k, v = m.qkv(x, i, tap)
    q = tap(f"Qcur_normed-{i}", m.norm(q.reshape(b, t, -1), f"blk.{i}.attn_q_norm").reshape(q.shape))
    k = tap(f"Kcur_normed-{i}", m.norm(k.reshape(b, t, -1), f"blk.{i}.attn_k_norm").reshape(k.shape))
    q = tap(f"Qcur_rope-{i}", m.ops.rope_halves(q, cos, sin))
    k = tap(f"Kcur_rope-{i}", m.ops.rope_halves(k, cos, sin))
    a = m.attention(i, q, k, v, step, window=c.windows[i])  # [b, t, head*dim]
    a = tap(f"attn_out-{i}", m.linear(a, f"blk.{i}.attn_output", tap))
    a = tap(f"attn_post_norm-{i}", m.norm(a, f"blk.{i}.post_attention_norm"))
    x = tap(f"ffn_inp-{i}", m.ops.add(a, x))
    f = swiglu(m, i, x, tap)
    f = tap(f"ffn_post_norm-{i}", m.norm(f, f"blk.{i}.post_ffw_norm"))
    return tap(f"l_out-{i}", m.ops.add(f, x))
