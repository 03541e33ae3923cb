"""mamba2: Mamba 2 and Codestral Mamba. A selective scan of states instead of attention, no FFN (arXiv:2405.21060)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from llamaref.config import Config, Ssm, Traits
from llamaref.errors import ModelError

if TYPE_CHECKING:
    from llamaref.engine import Array, Engine, Step
    from llamaref.metadata import Reader


def configure(c: Config, read: Reader) -> Config:
    """Sizes of the scan (llama.cpp, src/models/mamba2.cpp)."""
    ssm = Ssm(
        d_conv=read.count("ssm.conv_kernel"),
        d_inner=read.count("ssm.inner_size"),
        d_state=read.count("ssm.state_size"),
        n_head=read.count("ssm.time_step_rank"),
        n_group=read.count("ssm.group_count"),
    )
    if ssm.d_inner % ssm.n_head or ssm.d_inner % ssm.n_group or ssm.n_head % ssm.n_group:
        raise ModelError(f"{read.prefix}ssm: {ssm.d_inner} channels, {ssm.n_head} heads, {ssm.n_group} groups: uneven")
    return replace(c.without_rope(), ssm=ssm)


TRAITS = Traits(
    layers="PRE_NORM SSM_SCAN",
    keys=(
        "ssm.conv_kernel ssm.inner_size ssm.state_size ssm.time_step_rank ssm.group_count "
        "attention.recurrent_layers"  # all of them, whatever it says
    ),
)


def layer(m: Engine, i: int, x: Array, step: Step) -> Array:
    """One block: [b, t, embd] -> [b, t, embd]."""
    tap = step.tap
    h = tap(f"attn_norm-{i}", m.norm(x, f"blk.{i}.attn_norm"))
    return tap(f"l_out-{i}", m.ops.add(mixer(m, i, h, step), x))


def mixer(m: Engine, i: int, h: Array, step: Step) -> Array:
    """Gate, convolution over the last tokens, and scan: [b, t, embd] -> [b, t, embd]."""
    s, tap = m.config.ssm, step.tap
    b, t, _ = h.shape
    h = tap(f"ssm_in-{i}", m.linear(h, f"blk.{i}.ssm_in", tap))
    z, xbc, dt = np.split(h, [s.d_inner, s.d_inner + s.conv_dim], axis=-1)  # [b, t, inner], [b, t, conv], [b, t, head]
    xbc = m.ops.silu(tap(f"ssm_conv-{i}", m.conv(xbc, i, step)))
    dt = tap(f"ssm_dt-{i}", dt + m.vector(f"blk.{i}.ssm_dt.bias", s.n_head))
    x, k, q = np.split(xbc, [s.d_inner, s.d_inner + s.n_group * s.d_state], axis=-1)
    x = x.reshape(b, t, s.n_head, -1)  # [b, t, head, dim]: V of attention; B and C are its K and Q
    k, q = (part.reshape(b, t, s.n_group, s.d_state) for part in (k, q))
    y = tap(f"ssm_scan-{i}", m.scan(x, dt, k, q, i, step))  # [b, t, head, dim]
    y = tap(f"mamba2_y_add_d-{i}", y + x * m.vector(f"blk.{i}.ssm_d", s.n_head)[:, None])
    y = m.ops.swiglu(z, y.reshape(b, t, s.d_inner)).reshape(b, t, s.n_group, -1)
    weight = m.vector(f"blk.{i}.ssm_norm.weight", s.d_inner).reshape(s.n_group, -1)
    y = tap(f"ssm_norm-{i}", m.ops.rms_norm(y, weight, m.config.rms_eps))
    return tap(f"mamba_out-{i}", m.linear(y.reshape(b, t, s.d_inner), f"blk.{i}.ssm_out", tap))
