"""cos and sin of RoPE as engines round them."""

from __future__ import annotations

from typing import Any

import numpy as np
from llamaref import ops
from llamaref.config import Rope
from numpy.typing import NDArray

from llamadiff.numerics.halves import round_bf16

Array = NDArray[Any]


def ggml_theta(positions: Array, base: float, n_rot: int, pairs: int) -> Array:
    """RoPE's angles as ggml makes them: [token, pair], float32.

    The angle starts at the position and is multiplied by base^(-2 / n_rot) from pair to pair, all in float32
    (ggml-cpu/ops.cpp, ggml_rope_cache_init), so its relative error grows with the pair.
    """
    step = np.float32(base) ** np.float32(-2.0 / n_rot)
    powers = np.full((len(positions), pairs), step, np.float32)
    powers[:, 0] = positions
    return np.asarray(np.multiply.accumulate(powers, axis=1, dtype=np.float32))


def ggml_angles(rope: Rope, positions: Array, freq_factors: Array | None) -> tuple[Array, Array]:
    """cos and sin of RoPE as ggml rounds them: [token, n_rot / 2], float32."""
    theta = ggml_theta(positions, rope.base, rope.n_rot, rope.n_rot // 2)
    if freq_factors is not None:
        theta = theta / freq_factors.astype(np.float32)
    keep = (ops.yarn_keep(rope) if rope.yarn else np.zeros(theta.shape[1])).astype(np.float32)
    stretched = np.float32(1.0 / rope.factor) * theta
    theta = stretched * (1 - keep) + theta * keep
    magnitude = np.float32(ops.rope_magnitude(rope))
    return np.cos(theta) * magnitude, np.sin(theta) * magnitude


def bf16_angles(rope: Rope, positions: Array, freq_factors: Array | None) -> tuple[Array, Array]:
    """cos and sin of RoPE of angles that are kept in bfloat16: [token, n_rot / 2], float32."""
    theta = round_bf16(ops.rope_theta(rope, positions, freq_factors).astype(np.float32))
    magnitude = np.float32(ops.rope_magnitude(rope))
    return np.cos(theta) * magnitude, np.sin(theta) * magnitude
