"""mamba2: Mamba 2 and Codestral Mamba. A selective scan of states instead of attention, no FFN (arXiv:2405.21060)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from llamaref.engine import Array, Engine, Step

ROPE_PAIRS = False  # (2i, 2i+1), for which GGUF files permute the rows of Q and K; else halves (i, i + n/2)
NORM = "RMS_NORM"  # ggml's op of its norms
TRAITS = "PRE_NORM SSM_SCAN"  # what its layers have (llamadiff/trace/taps.py)
FFN_SCALES = False  # whether llama.cpp's graph multiplies by ffn_*.scale where a file has it


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
