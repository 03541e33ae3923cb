"""What keeps a state instead of all rows: Mamba 2's state space, and short convolutions."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray


class Recurrent:
    """The part of an engine that goes through tokens one after the other."""

    file: Any
    layer: int
    states: dict[tuple[str, int], Array]
    tap: Any
    name: Any
    bias: Any
    norm: Any
    product: Any
    linear: Any

    # -- sizes -----------------------------------------------------------------------------------------------------

    @property
    def inner_size(self) -> int:
        return int(self.file.get("ssm.inner_size"))

    @property
    def state_size(self) -> int:
        return int(self.file.get("ssm.state_size"))

    @property
    def groups(self) -> int:
        return int(self.file.get("ssm.group_count"))

    @property
    def state_heads(self) -> int:
        return int(self.file.get("ssm.time_step_rank"))

    # -- convolutions ----------------------------------------------------------------------------------------------

    def convolved(self, x: Array, stem: str) -> Array:
        """Each channel of rows [token, channel] through its own kernel [channel, width], newest value last."""
        kernel = self.kernel(stem)
        width = kernel.shape[-1]
        rows = self.with_history(x, width)
        return sum(rows[i : i + len(x)] * kernel[:, i] for i in range(width))

    def kernel(self, stem: str) -> Array:
        return self.file[self.name(stem)]

    def with_history(self, x: Array, width: int) -> Array:
        """The last rows before these, and these; zeros before the first."""
        before = self.history((width - 1, x.shape[-1]))
        rows = np.concatenate([before, x])
        self.states["conv", self.layer] = rows[len(rows) - (width - 1) :]
        return rows

    def history(self, shape: tuple[int, int]) -> Array:
        return self.states.get(("conv", self.layer), np.zeros(shape, np.float32))

    # -- Mamba 2 ---------------------------------------------------------------------------------------------------

    def state_space(self, y: Array) -> Array:
        rows = self.tap("ssm_in", self.linear(y, "ssm_in"))
        z, values, dt = self.state_parts(rows)
        values = self.tap("ssm_conv", self.convolved(values, "ssm_conv1d") + self.bias("ssm_conv1d"))
        x, b, c = self.scan_parts(self.after_convolution(values))
        dt = self.tap("ssm_dt", dt + self.step_bias())
        out = self.scanned(x, self.step_size(dt), b, c)
        out = self.tap("mamba2_y_add_d", out.astype(np.float32) + self.skipped(x))
        out = self.gated_norm(out, z.reshape(out.shape))
        return self.tap("mamba_out", self.linear(out, "ssm_out"))

    def state_parts(self, rows: Array) -> Any:
        """The gate, what is convolved, and the step sizes."""
        return np.split(rows, [self.inner_size, rows.shape[-1] - self.state_heads], axis=-1)

    def after_convolution(self, values: Array) -> Array:
        return values / (1 + np.exp(-values))

    def scan_parts(self, values: Array) -> tuple[Array, Array, Array]:
        """The input of each head, and B and C of each head's group."""
        n, wide = len(values), self.groups * self.state_size
        x, b, c = np.split(values, [self.inner_size, self.inner_size + wide], axis=-1)
        b, c = (part.reshape(n, self.groups, self.state_size)[:, self.group_of_head()] for part in (b, c))
        return x.reshape(n, self.state_heads, -1), b, c

    def group_of_head(self) -> Array:
        return np.arange(self.state_heads) // (self.state_heads // self.groups)

    def step_bias(self) -> Array:
        return self.bias("ssm_dt")

    def step_size(self, dt: Array) -> Array:
        return np.logaddexp(0, dt.astype(np.float64))

    def decay(self) -> Array:
        """A of each head, below zero."""
        return self.file[f"blk.{self.layer}.ssm_a"].reshape(-1).astype(np.float64)

    def scanned(self, x: Array, steps: Array, b: Array, c: Array) -> Array:
        """h = exp(dt A) h + dt B x, y = C h: [token, head, dim]."""
        h = self.state((self.state_heads, x.shape[-1], self.state_size))
        out = []
        for t in range(len(x)):
            dt = steps[t][:, None, None]
            h = self.fading(dt) * h + dt * x[t][..., None] * b[t][:, None, :]
            out.append((h * c[t][:, None, :]).sum(axis=-1))
        self.states["state", self.layer] = h
        return np.stack(out)

    def fading(self, dt: Array) -> Array:
        return np.exp(dt * self.decay()[:, None, None])

    def state(self, shape: tuple[int, ...]) -> Array:
        return self.states.get(("state", self.layer), np.zeros(shape))

    def skipped(self, x: Array) -> Array:
        """What goes past the state: D times the input."""
        return x * self.skip_weight()

    def skip_weight(self) -> Array:
        return self.file[f"blk.{self.layer}.ssm_d"].reshape(-1, 1)

    def gated_norm(self, out: Array, z: Array) -> Array:
        """Gated, then normalised group by group."""
        gated = (out * z / (1 + np.exp(-z))).reshape(len(out), self.groups, -1)
        return self.tap("ssm_norm", self.norm(gated, "ssm_norm")).reshape(len(out), -1)

    # -- LFM2's short convolution ----------------------------------------------------------------------------------

    def short_convolution(self, y: Array) -> Array:
        rows = self.tap("conv_in", self.linear(y, "shortconv.in_proj"))
        b, c, x = self.gates(rows)
        mixed = self.tap("conv", self.convolved(self.gate_in(b, x), "shortconv.conv"))
        return self.tap("conv_out", self.linear(self.gate_out(c, mixed), "shortconv.out_proj"))

    def gates(self, rows: Array) -> Any:
        return np.split(rows, 3, axis=-1)

    def gate_in(self, b: Array, x: Array) -> Array:
        return b * x

    def gate_out(self, c: Array, mixed: Array) -> Array:
        return c * mixed
