"""gemma3: Gemma 3. Gemma with norms after each branch and of Q and K heads; layers with a window and their own RoPE."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from llamaref.config import Config, Traits, Windows
from llamaref.ffn import geglu
from llamaref.models.gemma2 import set_scales

if TYPE_CHECKING:
    from llamaref.engine import Array, Engine, Step
    from llamaref.metadata import Reader


def configure(c: Config, read: Reader) -> Config:
    """Scales, a cap of the logits where a file has one; layers with a window have plain RoPE with their own base."""
    c = replace(set_scales(c, read, n_layer_27b=62), logit_cap=read.number("final_logit_softcapping", 0.0))
    base = read.number("rope.freq_base_swa", 10000.0)
    return c.with_local_rope(replace(c.rope, factor=1.0, yarn=False, base=base))


TRAITS = Traits(
    layers="PRE_NORM ATTENTION FFN GEGLU",
    scales_queries=True,
    windows=Windows(length=0, period=6),
    keys="attention.scale final_logit_softcapping rope.freq_base_swa",
)


def layer(m: Engine, i: int, x: Array, step: Step) -> Array:
    """One block: [b, t, embd] -> [b, t, embd]."""
    c, tap = m.config, step.tap
    cos, sin = step.angles[c.ropes[i]]
    h = tap(f"attn_norm-{i}", m.norm(x, f"blk.{i}.attn_norm"))
    q, k, v = m.qkv(h, i, tap)
    q = tap(f"Qcur_normed-{i}", m.norm(q, f"blk.{i}.attn_q_norm"))
    k = tap(f"Kcur_normed-{i}", m.norm(k, f"blk.{i}.attn_k_norm"))
    q = tap(f"Qcur_rope-{i}", m.ops.rope_halves(q, cos, sin))
    k = tap(f"Kcur_rope-{i}", m.ops.rope_halves(k, cos, sin))
    a = m.attention(i, q, k, v, step, window=c.windows[i])  # [b, t, head*dim]
    a = tap(f"attn_out-{i}", m.linear(a, f"blk.{i}.attn_output", tap))
    a = tap(f"attn_post_norm-{i}", m.norm(a, f"blk.{i}.post_attention_norm"))
    x = tap(f"ffn_inp-{i}", m.ops.add(a, x))
    h = tap(f"ffn_norm-{i}", m.norm(x, f"blk.{i}.ffn_norm"))
    f = geglu(m, i, h, tap)
    f = tap(f"ffn_post_norm-{i}", m.norm(f, f"blk.{i}.post_ffw_norm"))
    return tap(f"l_out-{i}", m.ops.add(f, x))
