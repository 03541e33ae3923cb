"""Mistakes of ops that have no reader of their own: what was read in another way is said, with its value."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")  # whose engine they run
import torch

from proof.unknown import report
from proof.unknown.fault import Fault, Faults

FAULTS = Faults()


@FAULTS("gpt-oss", "kq_soft_max-0", "it takes blk.0.attn_sinks.weight plus 0.6931", of="softmax")
def sinks_twice(e, right, i, x):
    """Each head's sink counts twice."""
    if i < 0:
        return right(i, x)
    sink = e.weight(f"blk.{i}.attn_sinks.weight")[:, None, None]
    powers = np.exp(x)
    return (powers / (powers.sum(-1, keepdims=True) + 2 * np.exp(sink))).astype(np.float32)


@FAULTS("gpt-oss", "ffn_moe_swiglu_oai-0", "it takes ffn_moe_gate-0 as at least -1", of="glu_oai")
def gate_limited_below(e, right, gate, up):
    """The gate is clamped on both sides; the model does so on one."""
    return right(np.clip(gate, -1, 7), up)


@FAULTS("qwen35.F16", "attn_output-0", "reads group h // 2 of queries and keys for head h", of="tile")
def heads_repeated(m, right, x, heads):
    """Heads of queries and keys are repeated, not tiled."""
    return x.repeat_interleave(heads // x.shape[1], 1)


@FAULTS("qwen35.F16", "attn_output-0", "writes values as they are", of="rule")
def uncorrected(m, right, i, q, k, v, gate, beta):
    """Linear attention: nothing is taken off a value that the state says of its key already."""
    state, out = m.op.begin(m, i, (q.shape[1], v.shape[2], k.shape[2])), []
    for t in range(len(q)):
        state = state * gate[t].exp()[:, None, None] + (beta[t][:, None] * v[t])[..., None] * k[t][:, None]
        out.append((state * q[t][:, None]).sum(-1) * q.shape[-1] ** -0.5)
    m.state["ssm", i] = state
    return torch.stack(out)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_it_is_said(fault: Fault, tmp_path: Path) -> None:
    report.write_models(tmp_path, {fault.model})
    said = report.judge(tmp_path, fault, "whole")
    assert (said["code"], said["tap"]) == (1, fault.first), said["text"]
    assert fault.source in said["headline"]
