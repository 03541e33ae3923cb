"""The feed-forward branches that several architectures share: [b, t, embd] -> [b, t, embd]."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from llamaref.engine import Array, Engine, Tap

    Branch = Callable[[Engine, int, Array, Tap], Array]


def swiglu(m: Engine, i: int, h: Array, tap: Tap) -> Array:
    """down(silu(gate(h)) * up(h))."""
    g = tap(f"ffn_gate-{i}", m.linear(h, f"blk.{i}.ffn_gate", tap))  # [b, t, ff]
    u = tap(f"ffn_up-{i}", m.linear(h, f"blk.{i}.ffn_up", tap))  # [b, t, ff]
    a = tap(f"ffn_swiglu-{i}", m.ops.swiglu(g, u))
    return tap(f"ffn_out-{i}", m.linear(a, f"blk.{i}.ffn_down", tap))


def geglu(m: Engine, i: int, h: Array, tap: Tap) -> Array:
    """down(gelu(gate(h)) * up(h))."""
    g = tap(f"ffn_gate-{i}", m.linear(h, f"blk.{i}.ffn_gate", tap))  # [b, t, ff]
    u = tap(f"ffn_up-{i}", m.linear(h, f"blk.{i}.ffn_up", tap))  # [b, t, ff]
    a = tap(f"ffn_geglu-{i}", m.gelu(g, tap) * u)
    return tap(f"ffn_out-{i}", m.linear(a, f"blk.{i}.ffn_down", tap))
