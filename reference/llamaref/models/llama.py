"""llama: Llama 1 to 3, Mistral, Mixtral, TinyLlama, SmolLM. RoPE in pairs, SwiGLU or a mixture of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llamaref.config import Traits
from llamaref.ffn import swiglu

if TYPE_CHECKING:
    from llamaref.engine import Array, Engine, Step, Tap

TRAITS = Traits(
    layers="PRE_NORM ATTENTION FFN SWIGLU",
    rope_pairs=True,
    ffn_scales=True,
)


def layer(m: Engine, i: int, x: Array, step: Step) -> Array:
    """One block: [b, t, embd] -> [b, t, embd]."""
    tap = step.tap
    h = tap(f"attn_norm-{i}", m.norm(x, f"blk.{i}.attn_norm"))
    q, k, v = m.qkv(h, i, tap)
    q = tap(f"Qcur_rope-{i}", m.ops.rope_pairs(q, step.cos, step.sin))
    k = tap(f"Kcur_rope-{i}", m.ops.rope_pairs(k, step.cos, step.sin))
    a = m.attention(i, q, k, v, step)  # [b, t, head*dim]
    a = tap(f"attn_out-{i}", m.linear(a, f"blk.{i}.attn_output", tap))
    x = tap(f"ffn_inp-{i}", m.ops.add(a, x))
    h = tap(f"ffn_norm-{i}", m.norm(x, f"blk.{i}.ffn_norm"))
    f = moe(m, i, h, tap) if f"blk.{i}.ffn_gate_inp.weight" in m.w else swiglu(m, i, h, tap)
    return tap(f"l_out-{i}", m.ops.add(f, x))


def moe(m: Engine, i: int, h: Array, tap: Tap) -> Array:
    """The weighted sum of each token's chosen experts (Mixtral, arXiv:2401.04088): [b, t, embd] -> [b, t, embd]."""
    logits = tap(f"ffn_moe_logits-{i}", m.linear(h, f"blk.{i}.ffn_gate_inp", tap))  # [b, t, expert]
    probs = tap(f"ffn_moe_probs-{i}", m.ops.softmax(logits))
    chosen = tap(f"ffn_moe_topk-{i}", m.ops.top_k(probs, m.config.n_expert_used))  # [b, t, used]
    w = tap(f"ffn_moe_weights-{i}", np.take_along_axis(probs, chosen, axis=-1))  # [b, t, used]
    w = tap(f"ffn_moe_weights_norm-{i}", m.ops.normalize_weights(w))
    g = tap(f"ffn_moe_gate-{i}", m.experts(h[..., None, :], f"blk.{i}.ffn_gate_exps", chosen, tap))  # [b, t, used, ff]
    u = tap(f"ffn_moe_up-{i}", m.experts(h[..., None, :], f"blk.{i}.ffn_up_exps", chosen, tap))  # [b, t, used, ff]
    a = tap(f"ffn_moe_swiglu-{i}", m.ops.swiglu(g, u))
    d = tap(f"ffn_moe_down-{i}", m.experts(a, f"blk.{i}.ffn_down_exps", chosen, tap))  # [b, t, used, embd]
    return tap(f"ffn_out-{i}", m.ops.weighted_sum(d, w))
