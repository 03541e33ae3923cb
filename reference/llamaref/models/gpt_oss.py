"""gpt-oss: OpenAI's gpt-oss. RoPE in halves, attention sinks, windows, experts with biases and OAI-SwiGLU."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from llamaref.config import Config, Traits, Windows

if TYPE_CHECKING:
    from llamaref.engine import Array, Engine, Step, Tap
    from llamaref.metadata import Reader


def configure(c: Config, read: Reader) -> Config:
    """Layers with a window may have a base of their own."""
    return c.with_local_rope(replace(c.rope, base=read.number("rope.freq_base_swa", c.rope.base)))


TRAITS = Traits(
    layers="PRE_NORM ATTENTION LATE_NORM FFN SOFTMAX_WEIGHT SWIGLU_OAI",
    windows=Windows(length=None, period=2),
    keys="rope.freq_base_swa",
)


def layer(m: Engine, i: int, x: Array, step: Step) -> Array:
    """One block: [b, t, embd] -> [b, t, embd]."""
    c, tap = m.config, step.tap
    cos, sin = step.angles[c.ropes[i]]
    h = tap(f"attn_norm-{i}", m.norm(x, f"blk.{i}.attn_norm"))
    q, k, v = m.qkv(h, i, tap)
    q = tap(f"Qcur_rope-{i}", m.ops.rope_halves(q, cos, sin))
    k = tap(f"Kcur_rope-{i}", m.ops.rope_halves(k, cos, sin))
    sinks = m.vector(f"blk.{i}.attn_sinks.weight", c.n_head)
    a = m.attention(i, q, k, v, step, window=c.windows[i], sinks=sinks)  # [b, t, head*dim]
    a = tap(f"attn_out-{i}", m.linear(a, f"blk.{i}.attn_output", tap))
    x = tap(f"ffn_inp-{i}", m.ops.add(a, x))
    h = tap(f"attn_post_norm-{i}", m.norm(x, f"blk.{i}.post_attention_norm"))
    return tap(f"l_out-{i}", m.ops.add(moe(m, i, h, tap), x))


def moe(m: Engine, i: int, h: Array, tap: Tap) -> Array:
    """The weighted sum of each token's chosen experts; softmax over the chosen only: [b, t, embd] -> [b, t, embd]."""
    logits = tap(f"ffn_moe_logits-{i}", m.linear(h, f"blk.{i}.ffn_gate_inp", tap))  # [b, t, expert]
    chosen = tap(f"ffn_moe_topk-{i}", m.ops.top_k(logits, m.config.n_expert_used))  # [b, t, used]
    w = tap(f"ffn_moe_weights-{i}", np.take_along_axis(logits, chosen, axis=-1))  # [b, t, used]
    w = tap(f"ffn_moe_weights_softmax-{i}", m.ops.softmax(w))
    g = tap(f"ffn_moe_gate-{i}", m.experts(h[..., None, :], f"blk.{i}.ffn_gate_exps", chosen, tap))  # [b, t, used, ff]
    u = tap(f"ffn_moe_up-{i}", m.experts(h[..., None, :], f"blk.{i}.ffn_up_exps", chosen, tap))  # [b, t, used, ff]
    a = tap(f"ffn_moe_swiglu_oai-{i}", m.ops.swiglu_oai(g, u))
    d = tap(f"ffn_moe_down-{i}", m.experts(a, f"blk.{i}.ffn_down_exps", chosen, tap))  # [b, t, used, embd]
    return tap(f"ffn_out-{i}", m.ops.weighted_sum(d, w))
