"""State spaces and short convolutions go wrong."""

from __future__ import annotations

from typing import Any

import numpy as np

from proof.unseen.bugs.bug import bug
from proof.unseen.engine import Engine


def _moved(e: Engine, x: Any, width: int, shift: int) -> Any:
    """What a convolution sees, its tokens later or earlier."""
    rows = Engine.with_history(e, x, width)
    out = np.zeros_like(rows)
    if shift > 0:
        out[shift:] = rows[:-shift]
    else:
        out[:shift] = rows[-shift:]
    return out


def _behind(e: Engine, x: Any, width: int) -> Any:
    rows = Engine.with_history(e, x, width)
    return np.concatenate([rows[width - 1 :], rows[: width - 1]])


def _swapped(e: Engine, values: Any) -> Any:
    x, b, c = Engine.scan_parts(e, values)
    return x, c, b


def _gate_first(e: Engine, out: Any, z: Any) -> Any:
    """Normalised first, gated afterwards."""
    normed = e.norm(out.reshape(len(out), e.groups, -1), "ssm_norm")
    return e.tap("ssm_norm", normed * (z / (1 + np.exp(-z))).reshape(normed.shape)).reshape(len(out), -1)


def _ungated(e: Engine, out: Any, z: Any) -> Any:
    return e.tap("ssm_norm", e.norm(out.reshape(len(out), e.groups, -1), "ssm_norm")).reshape(len(out), -1)


def _convolved_first(e: Engine, rows: Any) -> Any:
    """What is convolved, then the gate."""
    values, z, dt = np.split(rows, [rows.shape[-1] - e.state_heads - e.inner_size, -e.state_heads], axis=-1)
    return z, values, dt


def _gates(*order: int) -> Any:
    def gates(e: Engine, rows: Any) -> Any:
        parts = Engine.gates(e, rows)
        return [parts[i] for i in order]

    return gates


BUGS = (
    bug("convolution: kernel reversed", "convolution-reversed", kernel=lambda e, stem: Engine.kernel(e, stem)[:, ::-1]),
    bug("convolution: a token late", "convolution-shifted", with_history=lambda e, x, n: _moved(e, x, n, 1)),
    bug("convolution: a token early", "convolution-shifted", with_history=lambda e, x, n: _moved(e, x, n, -1)),
    bug("convolution: left out", "convolution-shifted", convolved=lambda e, x, stem: x),
    bug("convolution: state behind", "state-behind", with_history=_behind),
    bug("convolution: no bias", "bias-missing",
        bias=lambda e, stem: np.float32(0) if stem == "ssm_conv1d" else Engine.bias(e, stem)),
    bug("convolution: no activation", "activation-missing", after_convolution=lambda e, x: x),
    bug("convolution: not kept between batches", "state-lost", True,
        history=lambda e, shape: np.zeros(shape, np.float32)),
    bug("state space: not kept between batches", "state-lost", True, state=lambda e, shape: np.zeros(shape)),
    bug("state space: dt without softplus", "step-size-wrong", step_size=lambda e, dt: dt.astype(np.float64)),
    bug("state space: softplus twice", "step-size-wrong",
        step_size=lambda e, dt: np.logaddexp(0, Engine.step_size(e, dt))),
    bug("state space: no bias of dt", "bias-missing", step_bias=lambda e: np.float32(0)),
    bug("state space: sign of A", "decay-wrong", decay=lambda e: -Engine.decay(e)),
    bug("state space: A as its logarithm", "decay-wrong", decay=lambda e: -np.exp(Engine.decay(e))),
    bug("state space: no decay", "decay-wrong", fading=lambda e, dt: 1.0),
    bug("state space: B and C swapped", "state-inputs-swapped", scan_parts=_swapped),
    bug("state space: no D", "skip-missing", skipped=lambda e, x: 0 * x),
    bug("state space: D of 1", "skip-missing", skip_weight=lambda e: np.float32(1)),
    bug("state space: gate after the norm", "gate-after-norm", gated_norm=_gate_first),
    bug("state space: no gate", "up-missing gate-missing", gated_norm=_ungated),
    bug("state space: gate behind what is convolved", "qkv-split", state_parts=_convolved_first),
    bug("short convolution: C, B, x", "qkv-split", gates=_gates(1, 0, 2)),
    bug("short convolution: x, B, C", "qkv-split", gates=_gates(1, 2, 0)),
    bug("short convolution: no gate before", "gate-missing", gate_in=lambda e, b, x: x),
    bug("short convolution: no gate behind", "gate-missing", gate_out=lambda e, c, x: x),
    bug("short convolution: gates added", "gate-missing", gate_in=lambda e, b, x: b + x),
)  # fmt: skip
