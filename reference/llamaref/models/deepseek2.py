"""deepseek2: DeepSeek V2, V3, R1. Latent attention (MLA), RoPE in pairs of a part of each head, shared experts.

Newer files keep K and V as one row of ``lora`` + ``rope`` values a token (attn_k_b and attn_v_b, absorbed into Q and
the output), older ones unfold every head's K and V from it (attn_kv_b).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from llamaref.config import Config
    from llamaref.engine import Array, Engine, Step, Tap

ROPE_PAIRS = True  # (2i, 2i+1), for which GGUF files permute the rows of Q and K; else halves (i, i + n/2)
NORM = "RMS_NORM"  # ggml's op of its norms
FFN_SCALES = False  # whether llama.cpp's graph multiplies by ffn_*.scale where a file has it


def taps(c: Config, i: int) -> str:
    """Of layer i."""
    q = "q_a q_a_norm q_b" if c.n_lora_q else "Qcur_proj"
    absorbed = "q_pe q_nope_absorbed kq kq_soft_max kqv kqv_mla"
    unfolded = "kv Qcur_rope kv_k kv_v kq kq_soft_max"
    normed = "ffn_moe_weights_norm" if c.expert_weights_norm else ""
    scaled = "ffn_moe_weights_scaled" if c.expert_weights_scale != 1 else ""
    chosen = f"""ffn_moe_logits ffn_moe_probs ffn_moe_probs_biased ffn_moe_topk ffn_moe_weights {normed} {scaled}
                 ffn_moe_gate ffn_moe_up ffn_moe_swiglu ffn_moe_down ffn_gate_shexp ffn_up_shexp ffn_swiglu ffn_shexp"""
    return f"""attn_norm {q} kv_cmpr_pe kv_cmpr k_pe {absorbed if c.absorbed else unfolded} kqv_out attn_out ffn_inp
               ffn_norm {"ffn_gate ffn_up ffn_swiglu" if i < c.n_layer_dense_lead else chosen} ffn_out l_out"""


def axes(c: Config, i: int) -> dict[str, tuple[str, ...]]:
    """Of the taps of layer i, where they are not the usual ones."""
    wide = dict.fromkeys(("ffn_moe_gate", "ffn_moe_up", "ffn_moe_swiglu"), ("token", "used", "ff_exp"))
    shared = {} if i < c.n_layer_dense_lead else {"ffn_swiglu": ("token", "ff_shexp")}
    return {"kv_v": ("token", "kv_head", "dim_v"), "kqv_out": ("token", "head*dim_v"), **wide, **shared}


def attention_scale(c: Config) -> float:
    """Of scores: YaRN's attention temperature is here, not in the angles (llama.cpp, discussion 7416)."""
    stretch = 0.1 * math.log(c.rope.factor)
    plain = 1.0 if c.rope.yarn and c.rope.log_mul else 1.0 + stretch
    magnitude = c.rope.attn_factor * (plain if c.rope.factor > 1 or not c.rope.yarn else 1.0)
    return (magnitude * (1.0 + c.rope.log_mul * stretch)) ** 2 / math.sqrt(c.head_k_mla)


def forward(m: Engine, tokens: Array, step: Step) -> Array:
    """[t] token ids -> logits [b, t, vocab]."""
    tap = step.tap
    x = tap("embd", m.embed(tokens))  # [b, t, embd]
    for i in step.layers:
        x = layer(m, i, x, step)
    x = tap("result_norm", m.norm(x, "output_norm"))
    return tap("result_output", m.logits(x, tap))


def layer(m: Engine, i: int, x: Array, step: Step) -> Array:
    """One block: [b, t, embd] -> [b, t, embd]."""
    c, tap = m.config, step.tap
    b, t, _ = x.shape
    h = tap(f"attn_norm-{i}", m.norm(x, f"blk.{i}.attn_norm"))
    q = query(m, i, h, tap).reshape(b, t, c.n_head, c.head_k_mla)
    kv = tap(f"kv_cmpr_pe-{i}", m.linear(h, f"blk.{i}.attn_kv_a_mqa", tap))  # [b, t, lora + rope]
    k_pe = kv[..., c.n_lora_kv :][..., None, :]  # [b, t, 1, rope]
    kv = tap(f"kv_cmpr-{i}", m.norm(kv[..., : c.n_lora_kv], f"blk.{i}.attn_kv_a_norm"))  # [b, t, lora]
    k_pe = tap(f"k_pe-{i}", m.ops.rope_pairs(k_pe, step.cos, step.sin))
    a = absorbed(m, i, q, kv, k_pe, step) if c.absorbed else unfolded(m, i, q, kv, k_pe, step)  # [b, t, head*dim_v]
    a = tap(f"attn_out-{i}", m.linear(a, f"blk.{i}.attn_output", tap))
    x = tap(f"ffn_inp-{i}", m.ops.add(a, x))
    h = tap(f"ffn_norm-{i}", m.norm(x, f"blk.{i}.ffn_norm"))
    f = ffn(m, i, h, tap) if i < c.n_layer_dense_lead else moe(m, i, h, tap)
    return tap(f"l_out-{i}", m.ops.add(f, x))


def query(m: Engine, i: int, h: Array, tap: Tap) -> Array:
    """Q through a bottleneck, or straight in the lite models: [b, t, embd] -> [b, t, head*dim]."""
    if not m.config.n_lora_q:
        return tap(f"Qcur_proj-{i}", m.linear(h, f"blk.{i}.attn_q", tap))
    q = tap(f"q_a-{i}", m.linear(h, f"blk.{i}.attn_q_a", tap))  # [b, t, lora_q]
    q = tap(f"q_a_norm-{i}", m.norm(q, f"blk.{i}.attn_q_a_norm"))
    return tap(f"q_b-{i}", m.linear(q, f"blk.{i}.attn_q_b", tap))


def absorbed(m: Engine, i: int, q: Array, kv: Array, k_pe: Array, step: Step) -> Array:
    """Attention of all heads over one row a token, which is K and V: -> [b, t, head*dim_v]."""
    c, tap = m.config, step.tap
    b, t, h, _ = q.shape
    q_pe = tap(f"q_pe-{i}", m.ops.rope_pairs(q[..., c.n_nope :], step.cos, step.sin))  # [b, t, h, rope]
    q_nope = q[..., : c.n_nope].transpose(0, 2, 1, 3)  # [b, h, t, nope]
    q_nope = tap(f"q_nope_absorbed-{i}", m.heads(q_nope, f"blk.{i}.attn_k_b", tap))  # [b, h, t, lora]
    q = np.concatenate([q_nope.transpose(0, 2, 1, 3), q_pe], axis=-1)  # [b, t, h, lora + rope]
    k = np.concatenate([kv[..., None, :], k_pe], axis=-1)  # [b, t, 1, lora + rope]
    keys, _ = step.cache.append(i, tap.stored("cache_k", k), k[..., :0])  # [b, s, 1, lora + rope]
    probs = m.probabilities(i, q, keys, step)  # [b, h, t, s]
    probs, values = tap.operands("cache_k", probs, keys[..., : c.n_lora_kv])
    a = m.ops.attention_values(probs, values).reshape(b, t, h, c.n_lora_kv).transpose(0, 2, 1, 3)
    a = tap(f"kqv-{i}", a)  # [b, h, t, lora]
    a = tap(f"kqv_mla-{i}", m.heads(a, f"blk.{i}.attn_v_b", tap))  # [b, h, t, dim_v]
    return tap(f"kqv_out-{i}", np.ascontiguousarray(a.transpose(0, 2, 1, 3)).reshape(b, t, h * c.head_v_mla))


def unfolded(m: Engine, i: int, q: Array, kv: Array, k_pe: Array, step: Step) -> Array:
    """Attention with K and V of every head: -> [b, t, head*dim_v]."""
    c, tap = m.config, step.tap
    b, t, h, _ = q.shape
    kv = tap(f"kv-{i}", m.linear(kv, f"blk.{i}.attn_kv_b", tap)).reshape(b, t, h, c.n_nope + c.head_v_mla)
    q_pe = m.ops.rope_pairs(q[..., c.n_nope :], step.cos, step.sin)  # [b, t, h, rope]
    q = tap(f"Qcur_rope-{i}", np.concatenate([q[..., : c.n_nope], q_pe], axis=-1))
    k = np.concatenate([kv[..., : c.n_nope], np.broadcast_to(k_pe, q_pe.shape)], axis=-1)
    return m.attention(i, q, k, kv[..., c.n_nope :], step)


def ffn(m: Engine, i: int, h: Array, tap: Tap) -> Array:
    """down(silu(gate(h)) * up(h)): [b, t, embd] -> [b, t, embd]."""
    g = tap(f"ffn_gate-{i}", m.linear(h, f"blk.{i}.ffn_gate", tap))  # [b, t, ff]
    u = tap(f"ffn_up-{i}", m.linear(h, f"blk.{i}.ffn_up", tap))  # [b, t, ff]
    a = tap(f"ffn_swiglu-{i}", m.ops.swiglu(g, u))
    return tap(f"ffn_out-{i}", m.linear(a, f"blk.{i}.ffn_down", tap))


def moe(m: Engine, i: int, h: Array, tap: Tap) -> Array:
    """The weighted sum of each token's chosen experts, and the shared ones: [b, t, embd] -> [b, t, embd]."""
    c = m.config
    logits = tap(f"ffn_moe_logits-{i}", m.linear(h, f"blk.{i}.ffn_gate_inp", tap))  # [b, t, expert]
    probs = tap(f"ffn_moe_probs-{i}", m.ops.sigmoid(logits) if c.expert_sigmoid else m.ops.softmax(logits))
    score = probs
    if f"blk.{i}.exp_probs_b.bias" in m.w:
        score = tap(f"ffn_moe_probs_biased-{i}", m.biased(probs, f"blk.{i}.exp_probs_b"))
    score = m.ops.best_groups(score, c.n_expert_groups, c.n_group_used)
    chosen = tap(f"ffn_moe_topk-{i}", m.ops.top_k(score, c.n_expert_used))  # [b, t, used]
    w = tap(f"ffn_moe_weights-{i}", np.take_along_axis(probs, chosen, axis=-1))  # [b, t, used]
    if c.expert_weights_norm:
        w = tap(f"ffn_moe_weights_norm-{i}", m.ops.normalized(w))
    if c.expert_weights_scale != 1:
        w = tap(f"ffn_moe_weights_scaled-{i}", w * np.asarray(c.expert_weights_scale, w.dtype))
    g, u = m.gate_up(h[..., None, :], i, chosen, tap)  # [b, t, used, ff] each
    g, u = tap(f"ffn_moe_gate-{i}", g), tap(f"ffn_moe_up-{i}", u)
    a = tap(f"ffn_moe_swiglu-{i}", m.ops.swiglu(g, u))
    d = tap(f"ffn_moe_down-{i}", m.experts(a, f"blk.{i}.ffn_down_exps", chosen, tap))  # [b, t, used, embd]
    return tap(f"ffn_out-{i}", m.ops.add(m.ops.weighted_sum(d, w), shared(m, i, h, tap)))


def shared(m: Engine, i: int, h: Array, tap: Tap) -> Array:
    """The experts that every token has, as one: [b, t, embd] -> [b, t, embd]."""
    g = tap(f"ffn_gate_shexp-{i}", m.linear(h, f"blk.{i}.ffn_gate_shexp", tap))  # [b, t, ff]
    u = tap(f"ffn_up_shexp-{i}", m.linear(h, f"blk.{i}.ffn_up_shexp", tap))  # [b, t, ff]
    a = tap(f"ffn_swiglu-{i}", m.ops.swiglu(g, u))
    return tap(f"ffn_shexp-{i}", m.linear(a, f"blk.{i}.ffn_down_shexp", tap))
