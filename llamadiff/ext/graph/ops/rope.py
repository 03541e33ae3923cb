"""RoPE in its layouts (normal, neox, multi-section, interleaved sections, vision), with YaRN and frequency factors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from llamadiff.ext.graph.op import Array, Op, op
from llamadiff.numerics.angles import ggml_theta

NEOX, MROPE, VISION, IMROPE = 2, 8, 24, 40  # ggml.h, GGML_ROPE_TYPE_*


@dataclass(frozen=True)
class Parameters:
    """op_params of ROPE (ggml_rope_impl)."""

    n_dims: int
    mode: int
    n_ctx_orig: int
    base: float
    scale: float
    ext_factor: float
    attn_factor: float
    beta_fast: float
    beta_slow: float
    sections: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, ints: Array, floats: Array) -> Parameters:
        base, scale, ext, attn, fast, slow = (float(value) for value in floats[5:11])
        sections = tuple(int(size) for size in ints[11:15])
        dims, mode, ctx = int(ints[1]), int(ints[2]), int(ints[4])
        return cls(dims, mode, ctx, base, scale, ext, attn, fast, slow, sections, int(ints[15]))

    @property
    def yarn_range(self) -> tuple[float, float]:
        """The pairs between which YaRN blends, before ggml rounds them outwards (ggml_rope_yarn_corr_dims)."""
        low, high = (
            self.n_dims * math.log(self.n_ctx_orig / (turns * 2 * math.pi)) / (2 * math.log(self.base))
            for turns in (self.beta_fast, self.beta_slow)
        )
        return max(0.0, low), min(self.n_dims - 1.0, high)


@op("ROPE", rounds=True, stored=True)
def rope(n: Op) -> Array:
    """x [.., token, head, dim] rotated by positions [token] (or four for each token), forwards."""
    return _rotated(n, 1.0)


@op("ROPE_BACK", rounds=True, stored=True)
def rope_back(n: Op) -> Array:
    """The inverse rotation."""
    return _rotated(n, -1.0)


def _rotated(n: Op, direction: float) -> Array:
    s = Parameters.of(n.ints, n.floats)
    turn, magnitude = _turns(n, s)
    return _turned(n, s, np.cos(turn) * magnitude, direction * np.sin(turn) * magnitude)


def _turns(n: Op, s: Parameters) -> tuple[Array, Any]:
    """By how much each pair of each token is turned [token, pair], and the factor of all: as exact as ``n.exact``."""
    theta = _angles(s, n.x(1).reshape(-1), n.x().shape[-3], _pairs(s), n.exact)
    return _scaled(s, theta, n.optional(2), n.exact)


def turned_as(n: Op, found: Array, off: float, least: float) -> Array:
    """Rotated by the angles that a result shows [.., token, head, dim]: those that all heads have together.

    They are taken to be no further from the right ones than ``off`` times the angle and ``least`` radians.
    """
    s, x = Parameters.of(n.ints, n.floats), n.x().astype(np.float64)
    (turn, magnitude), (first, second) = _turns(n, s), _places(s, x.shape[-1])
    z, w = (v[..., first] + 1j * v[..., second] for v in (x, found.astype(np.float64)))
    over = tuple(axis for axis in range(z.ndim) if axis not in (z.ndim - 3, z.ndim - 1))
    shown = np.angle((w * z.conj()).sum(axis=over) * np.exp(-1j * turn))  # [token, pair], beyond the right ones
    reach = off * np.abs(turn) + least
    turn = turn + np.clip(shown, -reach, reach)
    return _turned(n, s, np.cos(turn) * magnitude, np.sin(turn) * magnitude)


def _turned(n: Op, s: Parameters, cos: Array, sin: Array) -> Array:
    x, (first, second) = n.x(), _places(s, n.x().shape[-1])
    c, d = cos[:, None, :], sin[:, None, :]  # [token, 1, pair]
    out = np.array(x, np.float32, order="C")
    a, b = x[..., first], x[..., second]
    out[..., first], out[..., second] = a * c - b * d, a * d + b * c
    return out


def _pairs(s: Parameters) -> int:
    return s.n_dims // 2 if s.mode != VISION else s.n_dims


def _places(s: Parameters, width: int) -> tuple[Array, Array]:
    """Which values of a head make up the pairs."""
    i = np.arange(_pairs(s))
    if s.mode == 0:
        return s.offset + 2 * i, s.offset + 2 * i + 1
    return s.offset + i, s.offset + i + (width // 2 if s.mode == VISION else len(i))


def _angles(s: Parameters, positions: Array, tokens: int, half: int, exact: bool) -> Array:
    """theta of each token and pair; ggml multiplies it on from pair to pair in float32."""
    if not s.mode & MROPE:
        return _powers(s, positions[:tokens], np.arange(half), exact)
    by_section = positions.reshape(4, tokens)  # time, height, width, extra
    which = _sections(s, half)
    start = np.arange(half)
    if s.mode == VISION:  # each section counts its pairs from zero
        edges = np.cumsum((0, *s.sections))
        start = start % sum(s.sections) - edges[:-1][which]
    thetas = np.stack([_powers(s, by_section[part], start, exact) for part in range(4)])  # [4, token, pair]
    return np.asarray(np.take_along_axis(thetas, which[None, None, :].repeat(tokens, 1), axis=0)[0])


def _powers(s: Parameters, positions: Array, exponents: Array, exact: bool) -> Array:
    if exact:
        return np.asarray(positions[:, None] * s.base ** (-2.0 * exponents / s.n_dims))
    return np.asarray(ggml_theta(positions, s.base, s.n_dims, int(exponents.max()) + 1)[:, exponents])


def _sections(s: Parameters, half: int) -> Array:
    """Which of the four positions turns each pair (ggml_mrope_cache_init)."""
    t, h, w, e = s.sections
    sector = np.arange(half) % (t + h + w + e)
    if s.mode == IMROPE:
        turn = sector % 3
        limits = np.array([t, h, w])[turn]
        return np.where(sector < 3 * limits, turn, 3)
    return np.searchsorted(np.cumsum([t, h, w]), sector, side="right")


def _scaled(s: Parameters, theta: Array, factors: Array | None, exact: bool) -> tuple[Array, Any]:
    """The angles divided by frequency factors, scaled, blended by YaRN (arXiv:2309.00071), and YaRN's factor of all."""
    kind: type[Any] = np.float64 if exact else np.float32
    if factors is not None:
        theta = theta / factors.reshape(-1)[: theta.shape[1]].astype(kind)
    scaled, magnitude = kind(s.scale) * theta, s.attn_factor
    if s.ext_factor:
        keep = (_keep(s, theta.shape[1]) * s.ext_factor).astype(kind)
        scaled = scaled * (1 - keep) + theta * keep
        magnitude *= 1.0 + 0.1 * math.log(1.0 / s.scale)
    return scaled, kind(magnitude)


def _keep(s: Parameters, half: int) -> Array:
    """How much of each frequency stays unscaled."""
    low, high = s.yarn_range
    return yarn_ramp(half, math.floor(low), math.ceil(high))


def yarn_ramp(half: int, low: float, high: float) -> Array:
    """1 for pairs up to ``low``, 0 from ``high`` on, and a straight line between (rope_yarn_ramp)."""
    return np.asarray(1 - np.clip((np.arange(half) - low) / max(0.001, high - low), 0, 1))
