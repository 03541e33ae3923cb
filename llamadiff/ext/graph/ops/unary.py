"""Unary ops and GLUs. ggml computes GELU and quick GELU through tables of float16 (ggml-cpu/vec.h)."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from llamadiff.ext.graph.op import Array, Kernels, Op, op
from llamadiff.numerics.arithmetic import GELU_END, round_in_table
from llamadiff.numerics.halves import round_f16

SQRT_2_OVER_PI = 0.79788456080286535587989211986876  # ggml-cpu/vec.h
GELU_A, QUICK = 0.044715, -1.702
FUSED, UNFUSED = 0, 1  # kernels of GELU: whether its table's first product is rounded before it is added
_ERF = np.vectorize(math.erf, otypes=[np.float64])


def _sigmoid(x: Array) -> Array:
    return np.asarray(1.0 / (1.0 + np.exp(-x)))


def _gelu(x: Array) -> Array:
    return np.asarray(0.5 * x * (1.0 + np.tanh(SQRT_2_OVER_PI * x * (1.0 + GELU_A * x * x))))


def _gelu_single(x: Array, kernel: int) -> Array:
    """The same in float32, as ggml fills its table (ggml-cpu/vec.h); compilers fuse the product and the sum, or not."""
    root, coefficient = np.float32(SQRT_2_OVER_PI), np.float32(GELU_A)
    product = (coefficient * x).astype(np.float64) * x
    inner = (1.0 + (product if kernel == FUSED else product.astype(np.float32))).astype(np.float32)
    tanh = np.tanh((root * x * inner).astype(np.float64)).astype(np.float32)
    return np.asarray(np.float32(0.5) * x * (np.float32(1) + tanh))


def _gelu_erf(x: Array) -> Array:
    return np.asarray(0.5 * x * (1.0 + _ERF(x / math.sqrt(2.0))))


def _gelu_quick(x: Array) -> Array:
    return np.asarray(x / (1.0 + np.exp(QUICK * x)))


def softplus(x: Array) -> Array:
    """log(1 + exp(x)); from 20 on ggml takes it to be x (ggml_compute_softplus_f32)."""
    return np.where(x > 20.0, x, np.log1p(np.exp(np.minimum(x, 20.0))))


def _gelu_quick_single(x: Array) -> Array:
    """The same in float32, as ggml fills its table (ggml-cpu/vec.h)."""
    with np.errstate(over="ignore"):  # beyond float32 it is infinite, as ggml's is
        power = np.exp((np.float32(QUICK) * x).astype(np.float64)).astype(np.float32)
    return np.asarray(x * (np.float32(1) / (np.float32(1) + power)))


def gelu(n: Op, x: Array) -> Array:
    """GELU by tanh (Hendrycks & Gimpel 2016), or by ggml's table."""
    if n.exact:
        return _gelu(x.astype(np.float64)).astype(np.float32)
    table = round_in_table(_gelu_single(round_in_table(x).astype(np.float32), n.kernel))
    return np.where(x <= -GELU_END, np.float32(0), table)


def gelu_quick(n: Op, x: Array) -> Array:
    """x * sigmoid(1.702 x); ggml's table takes and gives float16."""
    if n.exact:
        return _gelu_quick(x.astype(np.float64)).astype(np.float32)
    return round_f16(_gelu_quick_single(round_f16(x)))


def _kernels(n: Op) -> tuple[int, ...]:
    return (FUSED, UNFUSED) if n.name in ("GELU", "GEGLU") else (FUSED,)


_PLAIN: dict[str, Callable[[Array], Array]] = {
    "ABS": np.abs, "SGN": np.sign, "NEG": np.negative, "STEP": lambda x: (x > 0).astype(np.float64), "TANH": np.tanh,
    "ELU": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))), "RELU": lambda x: np.maximum(x, 0),
    "SIGMOID": _sigmoid, "SILU": lambda x: x * _sigmoid(x), "EXP": np.exp, "EXPM1": np.expm1, "SOFTPLUS": softplus,
    "HARDSWISH": lambda x: x * np.clip((x + 3) / 6, 0, 1), "HARDSIGMOID": lambda x: np.clip((x + 3) / 6, 0, 1),
    "GELU_ERF": _gelu_erf, "FLOOR": np.floor, "CEIL": np.ceil, "TRUNC": np.trunc,
    "ROUND": lambda x: np.sign(x) * np.floor(np.abs(x) + 0.5), "SQR": np.square, "SQRT": np.sqrt, "LOG": np.log,
    "SIN": np.sin, "COS": np.cos,
}  # fmt: skip


@op(*_PLAIN, stored=True)
def unary(n: Op) -> Array:
    """An op of each value by itself, in float64 (ggml-cpu/unary-ops.cpp)."""
    return np.asarray(_PLAIN[n.name](n.x().astype(np.float64)), np.float32)


@op("GELU", rounds=Kernels(_kernels), stored=True)
def gelu_op(n: Op) -> Array:
    """GELU, by ggml's table or exactly."""
    return gelu(n, n.x())


@op("GELU_QUICK", rounds=True, stored=True)
def gelu_quick_op(n: Op) -> Array:
    """Quick GELU, by ggml's table or exactly."""
    return gelu_quick(n, n.x())


@op("XIELU", stored=True)
def xielu(n: Op) -> Array:
    """params: alpha_n, alpha_p, beta, eps (ggml-cpu/unary-ops.cpp, op_xielu)."""
    x = n.x().astype(np.float64)
    alpha_n, alpha_p, beta, eps = (float(value) for value in n.floats[1:5])
    below = (np.expm1(np.minimum(x, eps)) - x) * alpha_n + beta * x
    return np.where(x > 0, alpha_p * x * x + beta * x, below).astype(np.float32)


@op("LEAKY_RELU", stored=True)
def leaky_relu(n: Op) -> Array:
    """max(x, 0) + params[0] * min(x, 0)."""
    return np.asarray(np.maximum(n.x(), 0) + n.floats[0] * np.minimum(n.x(), 0))


def halves(n: Op) -> tuple[Array, Array]:
    """What is activated, and what it gates: two tensors, or the halves of one (params[1]: the other way round)."""
    other = n.optional(1)
    if other is not None:
        return n.x(), other
    first, second = np.split(n.x(), 2, axis=-1)
    return (second, first) if n.ints[1] else (first, second)


_GATES: dict[str, Callable[[Op, Array], Array]] = {
    "REGLU": lambda n, x: np.maximum(x, np.float32(0)),
    "GEGLU": gelu,
    "SWIGLU": lambda n, x: np.asarray(x.astype(np.float64) * _sigmoid(x.astype(np.float64)), np.float32),
    "GEGLU_ERF": lambda n, x: _gelu_erf(x.astype(np.float64)).astype(np.float32),
    "GEGLU_QUICK": gelu_quick,
}


@op(*_GATES, rounds=Kernels(_kernels), stored=True)
def glu(n: Op) -> Array:
    """activation(x) * gate (Shazeer 2020, arXiv:2002.05202)."""
    x, gate = halves(n)
    return _GATES[n.name](n, x) * gate


@op("SWIGLU_OAI", "SWIGLU_CLAMP", stored=True)
def swiglu_clamped(n: Op) -> Array:
    """x * sigmoid(alpha x) * gate, x at most the limit and the gate between -limit and limit: params[3].

    OAI's (gpt-oss) has its alpha in params[2] and multiplies by the gate plus one.
    """
    x, gate = (part.astype(np.float64) for part in halves(n))
    limit, is_oai = float(n.floats[3]), n.name == "SWIGLU_OAI"
    x, gate = np.minimum(x, limit), np.clip(gate, -limit, limit)
    alpha, beside = (float(n.floats[2]), 1.0) if is_oai else (1.0, 0.0)
    return np.asarray(x / (1.0 + np.exp(-alpha * x)) * (gate + beside), np.float32)
