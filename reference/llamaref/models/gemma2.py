"""gemma2: Gemma 2. Gemma with norms after each branch, windows in every other layer, caps on scores and logits."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from llamaref.config import Config, Traits, Windows
from llamaref.errors import ModelError
from llamaref.ffn import geglu

if TYPE_CHECKING:
    from llamaref.engine import Array, Engine, Step
    from llamaref.metadata import Reader


def configure(c: Config, read: Reader) -> Config:
    """Caps of scores and logits (llama-hparams.h), scales; layers with a window may have a base of their own."""
    c = set_scales(c, read, n_layer_27b=46)
    c = c.with_local_rope(replace(c.rope, base=read.number("rope.freq_base_swa", c.rope.base)))
    attention_cap = read.number("attn_logit_softcapping", 50.0)
    logit_cap = read.number("final_logit_softcapping", 30.0)
    if min(attention_cap, logit_cap) <= 0:
        keys = "attn_logit_softcapping, final_logit_softcapping"
        raise ModelError(f"gemma2: {keys}: caps of scores and logits must be positive")
    return replace(c, attention_cap=attention_cap, logit_cap=logit_cap)


def set_scales(c: Config, read: Reader, n_layer_27b: int) -> Config:
    """The embedding is scaled, and scores in the 27B models by other heads than they have (src/models/gemma2.cpp)."""
    scale = 1.0 / math.sqrt(c.n_embd // c.n_head if c.n_layer == n_layer_27b else c.head_k)
    stated = read.number("attention.scale", 0.0)
    if stated and not math.isclose(stated, scale, rel_tol=1e-6):
        raise ModelError(f"{read.prefix}attention.scale = {stated}: this architecture's is {scale}, which is not read")
    return replace(c, attention_scale=scale, embedding_scale=math.sqrt(c.n_embd))


TRAITS = Traits(
    layers="PRE_NORM ATTENTION FFN GEGLU",
    scales_queries=True,
    windows=Windows(length=4096, period=2),
    keys="attention.scale attn_logit_softcapping final_logit_softcapping rope.freq_base_swa",
)


def layer(m: Engine, i: int, x: Array, step: Step) -> Array:
    """One block: [b, t, embd] -> [b, t, embd]."""
    c, tap = m.config, step.tap
    cos, sin = step.angles[c.ropes[i]]
    h = tap(f"attn_norm-{i}", m.norm(x, f"blk.{i}.attn_norm"))
    q, k, v = m.qkv(h, i, tap)
    q = tap(f"Qcur_rope-{i}", m.ops.rope_halves(q, cos, sin))
    k = tap(f"Kcur_rope-{i}", m.ops.rope_halves(k, cos, sin))
    a = m.attention(i, q, k, v, step, window=c.windows[i], cap=c.attention_cap)  # [b, t, head*dim]
    a = tap(f"attn_out-{i}", m.linear(a, f"blk.{i}.attn_output", tap))
    a = tap(f"attn_post_norm-{i}", m.norm(a, f"blk.{i}.post_attention_norm"))
    x = tap(f"ffn_inp-{i}", m.ops.add(a, x))
    h = tap(f"ffn_norm-{i}", m.norm(x, f"blk.{i}.ffn_norm"))
    f = geglu(m, i, h, tap)
    f = tap(f"ffn_post_norm-{i}", m.norm(f, f"blk.{i}.post_ffw_norm"))
    return tap(f"l_out-{i}", m.ops.add(f, x))
