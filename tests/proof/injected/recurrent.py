"""State spaces and short convolutions go wrong."""

from __future__ import annotations

from typing import Any

import numpy as np

from proof.injected.base import DECODE, elsewhere
from proof.injected.products import bias_as
from proof.strangers.engine import Array, Edit, Engine


def moved(shift: int) -> dict[str, Edit]:
    """What a convolution sees, its tokens later or earlier."""

    def with_history(e: Engine, right: Edit, x: Array, width: int) -> Array:
        rows, empty = right(x, width), np.zeros((1, x.shape[-1]), x.dtype)
        return np.concatenate([empty, rows[:-1]] if shift > 0 else [rows[1:], empty])

    return {"with_history": with_history}


def behind(e: Engine, right: Edit, x: Array, width: int) -> Array:
    return np.roll(right(x, width), 1 - width, axis=0)


def swapped(e: Engine, right: Edit, values: Array) -> tuple[Array, Array, Array]:
    x, b, c = right(values)
    return x, c, b


def grouped(e: Engine, out: Array) -> Array:
    return e.norm(out.reshape(len(out), e.groups, -1), "ssm_norm")


def gate_last(e: Engine, right: Edit, out: Array, z: Array) -> Array:
    """Normalised first, gated afterwards."""
    normed = grouped(e, out)
    return e.tap("ssm_norm", normed * (z / (1 + np.exp(-z))).reshape(normed.shape)).reshape(len(out), -1)


def ungated(e: Engine, right: Edit, out: Array, z: Array) -> Array:
    return e.tap("ssm_norm", grouped(e, out)).reshape(len(out), -1)


def convolved_first(e: Engine, right: Edit, rows: Array) -> tuple[Array, Array, Array]:
    """What is convolved, then the gate."""
    values, z, dt = np.split(rows, [rows.shape[-1] - e.state_heads - e.inner_size, -e.state_heads], axis=-1)
    return z, values, dt


def gates_in(*order: int) -> dict[str, Edit]:
    def gates(e: Engine, right: Edit, rows: Array) -> list[Any]:
        parts = right(rows)
        return [parts[i] for i in order]

    return {"gates": gates}


def late_x(e: Engine, right: Edit, x: Array, *rest: Array) -> Array:
    return right(np.concatenate([np.zeros_like(x[:1]), x[:-1]]), *rest)


def no_b(e: Engine, right: Edit, values: Array) -> tuple[Array, Array, Array]:
    x, b, c = right(values)
    return x, 0 * b, c


def decayed_again(e: Engine, right: Edit, x: Array, steps: Array, b: Array, c: Array) -> Array:
    """Each batch but the first begins with a state that has decayed for its first token already."""
    place = "state", e.layer
    if place in e.states:
        e.states[place] = e.fading(steps[0][:, None, None]) * e.states[place]
    return right(x, steps, b, c)


def first_token_again(e: Engine, right: Edit, x: Array, steps: Array, b: Array, c: Array) -> Array:
    if ("state", e.layer) in e.states:
        right(x[:1], steps[:1], b[:1], c[:1])
    return right(x, steps, b, c)


def older(what: str) -> Edit:
    """A batch begins with the state behind the last batch but one."""

    def state(e: Engine, right: Edit, shape: tuple[int, ...]) -> Array:
        now = right(shape)
        before = e.states.get((f"older {what}", e.layer), now)
        e.states[f"older {what}", e.layer] = now
        return before

    return state


def undecayed(e: Engine, right: Edit, x: Array, steps: Array, b: Array, c: Array) -> Array:
    """What this batch writes is summed up as it was written."""
    shape = (e.state_heads, x.shape[-1], e.state_size)
    old, new = e.state(shape), np.zeros(shape)
    right(x, steps, b, c)
    out = []
    for t in range(len(x)):
        dt = steps[t][:, None, None]
        old, new = e.fading(dt) * old, new + dt * x[t][..., None] * b[t][:, None, :]
        out.append(((old + new) * c[t][:, None, :]).sum(axis=-1))
    return np.stack(out)


INJECTIONS = (
    elsewhere("convolution: kernel reversed", "convolution-reversed",
              {"kernel": lambda e, right, stem: right(stem)[:, ::-1]}),
    elsewhere("convolution: a token late", "convolution-shifted", moved(1)),
    elsewhere("convolution: a token early", "convolution-shifted", moved(-1)),
    elsewhere("convolution: left out", "convolution-shifted", {"convolved": lambda e, right, x, stem: x}),
    elsewhere("convolution: state behind", "state-behind", {"with_history": behind}),
    elsewhere("convolution: no bias", "bias-missing", bias_as(["ssm_conv1d"], lambda b: 0 * b)),
    elsewhere("convolution: no activation", "activation-missing", {"after_convolution": lambda e, right, x: x}),
    elsewhere("convolution: not kept between batches", "state-lost",
              {"history": lambda e, right, shape: np.zeros(shape, np.float32)}, decode=DECODE),
    elsewhere("state space: not kept between batches", "state-lost",
              {"state": lambda e, right, shape: np.zeros(shape)}, decode=DECODE),
    elsewhere("state space: decays once more between batches", "state-lost", {"scanned": decayed_again}, decode=DECODE),
    elsewhere("state space: a batch's first token twice", "state-lost", {"scanned": first_token_again}, decode=DECODE),
    elsewhere("state space: an older batch's", "state-lost", {"state": older("state")}, decode=DECODE),
    elsewhere("convolution: an older batch's", "state-lost", {"history": older("conv")}, decode=DECODE),
    elsewhere("state space: a batch's writes do not decay", "decay-missing-in-batch", {"scanned": undecayed}),
    elsewhere("state space: x of the token before", "recurrence-input-misplaced", {"scanned": late_x}),
    elsewhere("state space: groups in turns", "recurrence-group-wrong",
              {"group_of_head": lambda e, right: np.arange(e.state_heads) % e.groups}),
    elsewhere("state space: no B", "recurrence-input-misplaced", {"scan_parts": no_b}),
    elsewhere("state space: steps of at most 0.1", "step-size-limited",
              {"step_size": lambda e, right, dt: np.minimum(right(dt), 0.1)}),
    elsewhere("state space: steps of at least 0.5", "step-size-limited",
              {"step_size": lambda e, right, dt: np.maximum(right(dt), 0.5)}),
    elsewhere("state space: dt without softplus", "step-size-wrong",
              {"step_size": lambda e, right, dt: dt.astype(np.float64)}),
    elsewhere("state space: softplus twice", "step-size-wrong",
              {"step_size": lambda e, right, dt: np.logaddexp(0, right(dt))}),
    elsewhere("state space: no bias of dt", "bias-missing", {"step_bias": lambda e, right: 0 * right()}),
    elsewhere("state space: sign of A", "decay-wrong", {"decay": lambda e, right: -right()}),
    elsewhere("state space: A as its logarithm", "decay-wrong", {"decay": lambda e, right: -np.exp(right())}),
    elsewhere("state space: no decay", "decay-wrong", {"fading": lambda e, right, dt: 1.0}),
    elsewhere("state space: B and C swapped", "state-inputs-swapped", {"scan_parts": swapped}),
    elsewhere("state space: no D", "skip-missing", {"skipped": lambda e, right, x: 0 * x}),
    elsewhere("state space: D of 1", "skip-missing", {"skip_weight": lambda e, right: np.float32(1)}),
    elsewhere("state space: gate after the norm", "gate-after-norm", {"gated_norm": gate_last}),
    elsewhere("state space: no gate", "up-missing gate-missing", {"gated_norm": ungated}),
    elsewhere("state space: gate behind what is convolved", "qkv-split", {"state_parts": convolved_first}),
    elsewhere("short convolution: C, B, x", "qkv-split", gates_in(1, 0, 2)),
    elsewhere("short convolution: x, B, C", "qkv-split", gates_in(1, 2, 0)),
    elsewhere("short convolution: no gate before", "gate-missing", {"gate_in": lambda e, right, b, x: x}),
    elsewhere("short convolution: no gate behind", "gate-missing", {"gate_out": lambda e, right, c, x: x}),
    elsewhere("short convolution: gates added", "gate-missing", {"gate_in": lambda e, right, b, x: b + x}),
)  # fmt: skip
