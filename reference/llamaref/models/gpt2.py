"""gpt2: GPT-2. Learned positions instead of RoPE, LayerNorm, biases throughout, GELU without a gate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llamaref.config import Config, Traits

if TYPE_CHECKING:
    from llamaref.engine import Array, Engine, Step, Tap
    from llamaref.metadata import Reader


def configure(c: Config, read: Reader) -> Config:
    """Positions are in the embedding alone."""
    return c.without_rope()


TRAITS = Traits(
    layers="PRE_NORM ATTENTION FFN GELU",
    norm="NORM",
    learned_positions=True,
)


def layer(m: Engine, i: int, x: Array, step: Step) -> Array:
    """One block: [b, t, embd] -> [b, t, embd]."""
    tap = step.tap
    h = tap(f"attn_norm-{i}", m.layer_norm(x, f"blk.{i}.attn_norm"))
    q, k, v = m.qkv(h, i, tap)
    a = m.attention(i, q, k, v, step)  # [b, t, head*dim]
    a = tap(f"attn_out-{i}", m.linear(a, f"blk.{i}.attn_output", tap))
    x = tap(f"ffn_inp-{i}", m.ops.add(a, x))
    h = tap(f"ffn_norm-{i}", m.layer_norm(x, f"blk.{i}.ffn_norm"))
    return tap(f"l_out-{i}", m.ops.add(ffn(m, i, h, tap), x))


def ffn(m: Engine, i: int, h: Array, tap: Tap) -> Array:
    """down(gelu(up(h))): [b, t, embd] -> [b, t, embd]."""
    u = tap(f"ffn_up-{i}", m.linear(h, f"blk.{i}.ffn_up", tap))  # [b, t, ff]
    a = tap(f"ffn_gelu-{i}", m.gelu(u, tap))
    return tap(f"ffn_out-{i}", m.linear(a, f"blk.{i}.ffn_down", tap))
