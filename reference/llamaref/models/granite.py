"""granite: Granite 3 and 4. RoPE in pairs, SwiGLU; the embedding, scores, branches and logits are scaled."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from llamaref.config import Config, Traits
from llamaref.ffn import swiglu

if TYPE_CHECKING:
    from llamaref.engine import Array, Engine, Step
    from llamaref.metadata import Reader


def configure(c: Config, read: Reader) -> Config:
    """Scales of everything, and no RoPE in some files."""
    c = c.without_rope() if read.value("rope.scaling.finetuned", True) is False else c
    return replace(
        c,
        attention_scale=read.number("attention.scale", 0.0) or c.attention_scale,
        embedding_scale=read.number("embedding_scale", 0.0) or 1.0,
        residual_scale=read.number("residual_scale", 0.0) or 1.0,
        logit_scale=read.number("logit_scale", 1.0),
    )


TRAITS = Traits(
    layers="PRE_NORM ATTENTION FFN SWIGLU",
    rope_pairs=True,
    keys="attention.scale embedding_scale residual_scale logit_scale rope.scaling.finetuned",
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
    x = tap(f"ffn_inp-{i}", m.ops.add(a * c.residual_scale, x))
    h = tap(f"ffn_norm-{i}", m.norm(x, f"blk.{i}.ffn_norm"))
    return tap(f"l_out-{i}", m.ops.add(swiglu(m, i, h, tap) * c.residual_scale, x))
