"""Norms, over the innermost axis unless said otherwise."""

from __future__ import annotations

import numpy as np

from llamadiff.ext.graph.op import Array, Op, op


def _scaled(x: Array, eps: float, axis: int | tuple[int, ...] = -1) -> Array:
    """x / sqrt(mean(x^2) + eps), in float64."""
    return np.asarray(x / np.sqrt(np.mean(x * x, axis=axis, keepdims=True) + eps))


@op("RMS_NORM")
def rms_norm(n: Op) -> Array:
    """x / sqrt(mean(x^2) + eps): params[0] eps (arXiv:1910.07467)."""
    return _scaled(n.x().astype(np.float64), float(n.floats[0])).astype(np.float32)


@op("NORM")
def norm(n: Op) -> Array:
    """(x - mean) / sqrt(variance + eps): params[0] eps (arXiv:1607.06450)."""
    x = n.x().astype(np.float64)
    return _scaled(x - x.mean(axis=-1, keepdims=True), float(n.floats[0])).astype(np.float32)


@op("L2_NORM")
def l2_norm(n: Op) -> Array:
    """x / max(sqrt(sum(x^2)), eps): params[0] eps (ggml_compute_forward_l2_norm)."""
    x = n.x().astype(np.float64)
    size = np.sqrt(np.sum(x * x, axis=-1, keepdims=True))
    return np.asarray(x / np.maximum(size, float(n.floats[0])), np.float32)


@op("GROUP_NORM")
def group_norm(n: Op) -> Array:
    """LayerNorm over groups of channels, axis 2: params[0] groups, params[1] eps (arXiv:1803.08494)."""
    x = n.x().astype(np.float64)
    groups, channels = int(n.ints[0]), x.shape[-3]
    step = -(-channels // groups)
    out = np.empty_like(x)
    for start in range(0, channels, step):
        part = x[..., start : start + step, :, :]
        centred = part - part.mean(axis=(-3, -2, -1), keepdims=True)
        out[..., start : start + step, :, :] = _scaled(centred, float(n.floats[1]), (-3, -2, -1))
    return out.astype(np.float32)
