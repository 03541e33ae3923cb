"""deepseek2: DeepSeek V2, V3, R1. Latent attention (MLA), RoPE in pairs of a part of each head, shared experts.

Newer files keep K and V as one row of ``lora`` + ``rope`` values a token (attn_k_b and attn_v_b, absorbed into Q and
the output), older ones unfold every head's K and V from it (attn_kv_b).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from llamaref.config import Config, Latent, Rope, Router, Traits
from llamaref.errors import ModelError
from llamaref.ffn import swiglu

if TYPE_CHECKING:
    from llamaref.engine import Array, Engine, Step, Tap
    from llamaref.metadata import Reader


def configure(c: Config, read: Reader) -> Config:
    """Latent attention, how experts are chosen, and YaRN's attention temperature, which is in the scores."""
    rope = replace(c.rope, log_mul=10 * read.number("rope.scaling.yarn_log_multiplier", 0.0))
    return replace(
        c.with_rope(rope),
        attention_scale=magnitude(rope) ** 2 / math.sqrt(read.count("attention.key_length_mla", c.head_k)),
        latent=latent(rope, read),
        router=router(c, read),
    )


def magnitude(rope: Rope) -> float:
    """YaRN's attention temperature (llama.cpp, discussion 7416)."""
    stretch = 0.1 * math.log(rope.factor) if rope.factor > 0 else 0.0
    plain = 1.0 if rope.yarn and (rope.log_mul or rope.factor <= 1) else 1.0 + stretch
    return rope.attn_factor * plain * (1.0 + rope.log_mul * stretch)


def latent(rope: Rope, read: Reader) -> Latent:
    """Sizes of latent attention; key_length and value_length are a cache row's where those of MLA are given."""
    k, v = read.count("attention.key_length_mla", 0), read.count("attention.value_length_mla", 0)
    n_head, n_head_kv = read.count("attention.head_count"), read.count("attention.head_count_kv")
    if n_head_kv != (1 if k and v else n_head):
        raise ModelError(
            f"{read.prefix}attention.head_count_kv = {n_head_kv}: latent attention has 1, or {n_head} each"
        )
    lora_kv, lora_q = read.count("attention.kv_lora_rank"), read.count("attention.q_lora_rank", 0)
    row = read.count("attention.key_length"), read.count("attention.value_length")
    if k and v and row != (lora_kv + rope.n_rot, lora_kv):
        raise ModelError(
            f"{read.prefix}attention.key_length, value_length = {row}: a cache row has {lora_kv} values and RoPE's"
        )
    k, v = (k, v) if k and v else row
    if k <= rope.n_rot:
        raise ModelError(
            f"{read.prefix}rope.dimension_count = {rope.n_rot}: must be less than the {k} values of a head"
        )
    return Latent(lora_kv, lora_q, head_k=k, head_v=v, n_nope=k - rope.n_rot)


def router(c: Config, read: Reader) -> Router:
    """How experts are chosen (llama.cpp, src/models/deepseek2.cpp and build_moe_ffn)."""
    gating = read.count("expert_gating_func", 0)
    if not gating and c.n_layer in (47, 48) and read.vocabulary() == 154880:  # GLM 4.7 Flash
        gating = 2
    if gating > 2:
        raise ModelError(f"{read.prefix}expert_gating_func = {gating}: the engine knows 1 (softmax) and 2 (sigmoid)")
    r = Router(
        sigmoid=gating == 2,
        normalized=read.flag("expert_weights_norm"),
        scale=read.number("expert_weights_scale", 0.0) or 1.0,
        n_group=read.count("expert_group_count", 0),
        n_group_used=read.count("expert_group_used_count", 0),
    )
    fits = r.n_group <= 1 or (0 < r.n_group_used < r.n_group and c.n_expert % r.n_group == 0)
    if not fits or (r.n_group > 1 and c.n_expert < 2 * r.n_group):
        said = f"{r.n_group_used} of {r.n_group} groups of {c.n_expert} experts"
        raise ModelError(f"{read.prefix}expert_group_count: experts cannot be chosen from {said}")
    return r


TRAITS = Traits(
    layers="PRE_NORM ATTENTION LATENT FFN SWIGLU",
    rope_pairs=True,
    keys=(
        "attention.q_lora_rank attention.kv_lora_rank attention.key_length_mla attention.value_length_mla "
        "expert_weights_scale expert_weights_norm expert_gating_func expert_group_count expert_group_used_count "
        "rope.scaling.yarn_log_multiplier "
        "leading_dense_block_count expert_shared_count"  # the tensors say so
    ),
)


def layer(m: Engine, i: int, x: Array, step: Step) -> Array:
    """One block: [b, t, embd] -> [b, t, embd]."""
    c, tap = m.config.latent, step.tap
    b, t, _ = x.shape
    h = tap(f"attn_norm-{i}", m.norm(x, f"blk.{i}.attn_norm"))
    q = query(m, i, h, tap).reshape(b, t, m.config.n_head, c.head_k)
    kv = tap(f"kv_cmpr_pe-{i}", m.linear(h, f"blk.{i}.attn_kv_a_mqa", tap))  # [b, t, lora + rope]
    k_pe = kv[..., c.n_lora_kv :][..., None, :]  # [b, t, 1, rope]
    kv = tap(f"kv_cmpr-{i}", m.norm(kv[..., : c.n_lora_kv], f"blk.{i}.attn_kv_a_norm"))  # [b, t, lora]
    k_pe = tap(f"k_pe-{i}", m.ops.rope_pairs(k_pe, step.cos, step.sin))
    attend = attend_absorbed if f"blk.{i}.attn_k_b.weight" in m.w else attend_unfolded
    a = attend(m, i, q, kv, k_pe, step)  # [b, t, head*dim_v]
    a = tap(f"attn_out-{i}", m.linear(a, f"blk.{i}.attn_output", tap))
    x = tap(f"ffn_inp-{i}", m.ops.add(a, x))
    h = tap(f"ffn_norm-{i}", m.norm(x, f"blk.{i}.ffn_norm"))
    f = moe(m, i, h, tap) if f"blk.{i}.ffn_gate_inp.weight" in m.w else swiglu(m, i, h, tap)
    return tap(f"l_out-{i}", m.ops.add(f, x))


def query(m: Engine, i: int, h: Array, tap: Tap) -> Array:
    """Q through a bottleneck, or straight in the lite models: [b, t, embd] -> [b, t, head*dim]."""
    if f"blk.{i}.attn_q_a.weight" not in m.w:
        return tap(f"Qcur_proj-{i}", m.linear(h, f"blk.{i}.attn_q", tap))
    q = tap(f"q_a-{i}", m.linear(h, f"blk.{i}.attn_q_a", tap))  # [b, t, lora_q]
    q = tap(f"q_a_norm-{i}", m.norm(q, f"blk.{i}.attn_q_a_norm"))
    return tap(f"q_b-{i}", m.linear(q, f"blk.{i}.attn_q_b", tap))


def attend_absorbed(m: Engine, i: int, q: Array, kv: Array, k_pe: Array, step: Step) -> Array:
    """Attention of all heads over one row a token, which is K and V: -> [b, t, head*dim_v]."""
    c, tap = m.config.latent, step.tap
    b, t, h, _ = q.shape
    q_pe = tap(f"q_pe-{i}", m.ops.rope_pairs(q[..., c.n_nope :], step.cos, step.sin))  # [b, t, h, rope]
    q_nope = q[..., : c.n_nope].transpose(0, 2, 1, 3)  # [b, h, t, nope]
    q_nope = tap(f"q_nope_absorbed-{i}", m.heads(q_nope, f"blk.{i}.attn_k_b", tap))  # [b, h, t, lora]
    q = np.concatenate([q_nope.transpose(0, 2, 1, 3), q_pe], axis=-1)  # [b, t, h, lora + rope]
    k = np.concatenate([kv[..., None, :], k_pe], axis=-1)  # [b, t, 1, lora + rope]
    keys, _ = step.cache.append(i, tap.store("cache_k", k), k[..., :0])  # [b, s, 1, lora + rope]
    values = keys[..., : c.n_lora_kv]  # [b, s, 1, lora]
    q, keys = tap.operands("cache_k", q, keys)
    scores = tap(f"kq-{i}", m.scores(q, keys, tap))  # [b, h, t, s]
    probs = m.ops.causal_softmax(scores, m.config.attention_scale, step.positions, step.key_positions)
    probs, values = tap.operands("cache_v", tap(f"kq_soft_max-{i}", probs), values)
    a = m.values(probs, values, tap).reshape(b, t, h, c.n_lora_kv)
    a = tap(f"kqv-{i}", a.transpose(0, 2, 1, 3))  # [b, h, t, lora]
    a = tap(f"kqv_mla-{i}", m.heads(a, f"blk.{i}.attn_v_b", tap))  # [b, h, t, dim_v]
    return tap(f"kqv_out-{i}", a.transpose(0, 2, 1, 3).reshape(b, t, h * c.head_v))


def attend_unfolded(m: Engine, i: int, q: Array, kv: Array, k_pe: Array, step: Step) -> Array:
    """Attention with K and V of every head: -> [b, t, head*dim_v]."""
    c, tap = m.config.latent, step.tap
    b, t, h, _ = q.shape
    kv = tap(f"kv-{i}", m.linear(kv, f"blk.{i}.attn_kv_b", tap)).reshape(b, t, h, c.n_nope + c.head_v)
    q_pe = m.ops.rope_pairs(q[..., c.n_nope :], step.cos, step.sin)  # [b, t, h, rope]
    q = tap(f"Qcur_rope-{i}", np.concatenate([q[..., : c.n_nope], q_pe], axis=-1))
    k = np.concatenate([kv[..., : c.n_nope], np.broadcast_to(k_pe, q_pe.shape)], axis=-1)
    return m.attention(i, q, k, kv[..., c.n_nope :], step)


def moe(m: Engine, i: int, h: Array, tap: Tap) -> Array:
    """The weighted sum of each token's chosen experts, and the shared ones: [b, t, embd] -> [b, t, embd]."""
    r = m.config.router
    logits = tap(f"ffn_moe_logits-{i}", m.linear(h, f"blk.{i}.ffn_gate_inp", tap))  # [b, t, expert]
    probs = tap(f"ffn_moe_probs-{i}", m.ops.sigmoid(logits) if r.sigmoid else m.ops.softmax(logits))
    score = probs
    if f"blk.{i}.exp_probs_b.bias" in m.w:
        bias = m.vector(f"blk.{i}.exp_probs_b.bias", m.config.n_expert)
        score = tap(f"ffn_moe_probs_biased-{i}", probs + bias)
    score = m.ops.best_groups(score, r.n_group, r.n_group_used)
    chosen = tap(f"ffn_moe_topk-{i}", m.ops.top_k(score, m.config.n_expert_used))  # [b, t, used]
    w = tap(f"ffn_moe_weights-{i}", np.take_along_axis(probs, chosen, axis=-1))  # [b, t, used]
    if r.normalized:
        w = tap(f"ffn_moe_weights_norm-{i}", m.ops.normalize_weights(w))
    if r.scale != 1:
        w = tap(f"ffn_moe_weights_scaled-{i}", w * np.asarray(r.scale, w.dtype))
    g, u = m.gate_up(h[..., None, :], i, chosen, tap)  # [b, t, used, ff] each
    g, u = tap(f"ffn_moe_gate-{i}", g), tap(f"ffn_moe_up-{i}", u)
    a = tap(f"ffn_moe_swiglu-{i}", m.ops.swiglu(g, u))
    d = tap(f"ffn_moe_down-{i}", m.experts(a, f"blk.{i}.ffn_down_exps", chosen, tap))  # [b, t, used, embd]
    return tap(f"ffn_out-{i}", m.ops.weighted_sum(d, w) + shared_experts(m, i, h, tap))


def shared_experts(m: Engine, i: int, h: Array, tap: Tap) -> Array:
    """The experts that every token has, as one: [b, t, embd] -> [b, t, embd]."""
    g = tap(f"ffn_gate_shexp-{i}", m.linear(h, f"blk.{i}.ffn_gate_shexp", tap))  # [b, t, ff]
    u = tap(f"ffn_up_shexp-{i}", m.linear(h, f"blk.{i}.ffn_up_shexp", tap))  # [b, t, ff]
    a = tap(f"ffn_swiglu-{i}", m.ops.swiglu(g, u))
    return tap(f"ffn_shexp-{i}", m.linear(a, f"blk.{i}.ffn_down_shexp", tap))
