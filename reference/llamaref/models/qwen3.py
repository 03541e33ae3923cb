"""qwen3: Qwen 3. RoPE in halves, RMSNorm of every Q and K head, SwiGLU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llamaref.config import Traits
from llamaref.ffn import swiglu

if TYPE_CHECKING:
    from llamaref.engine import Array, Engine, Step
    from llamaref.ffn import Branch

TRAITS = Traits(
    layers="PRE_NORM ATTENTION FFN SWIGLU",
    ffn_scales=True,
)


def layer(m: Engine, i: int, x: Array, step: Step, ffn: Branch = swiglu) -> Array:
    """One block: [b, t, embd] -> [b, t, embd]."""
    tap = step.tap
    h = tap(f"attn_norm-{i}", m.norm(x, f"blk.{i}.attn_norm"))
    q, k, v = m.qkv(h, i, tap)
    q = tap(f"Qcur_normed-{i}", m.norm(q, f"blk.{i}.attn_q_norm"))
    k = tap(f"Kcur_normed-{i}", m.norm(k, f"blk.{i}.attn_k_norm"))
    q = tap(f"Qcur_rope-{i}", m.ops.rope_halves(q, step.cos, step.sin))
    k = tap(f"Kcur_rope-{i}", m.ops.rope_halves(k, step.cos, step.sin))
    a = m.attention(i, q, k, v, step)  # [b, t, head*dim]
    a = tap(f"attn_out-{i}", m.linear(a, f"blk.{i}.attn_output", tap))
    x = tap(f"ffn_inp-{i}", m.ops.add(a, x))
    h = tap(f"ffn_norm-{i}", m.norm(x, f"blk.{i}.ffn_norm"))
    return tap(f"l_out-{i}", m.ops.add(ffn(m, i, h, tap), x))
