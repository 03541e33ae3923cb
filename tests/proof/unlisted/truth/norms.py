"""Checks of what is read back of norms."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from proof.strangers.arithmetic import bfloat, half
from proof.unlisted.truth.op import Op, numbers

Array = np.ndarray


def normed(op: Op) -> tuple[Array, Array, Array]:
    """A norm's input rows, weight and bias."""
    stems = {"Qcur_normed": "attn_q_norm", "Kcur_normed": "attn_k_norm", "result_norm": "output_norm"}
    stem = stems.get(op.word, op.word) if op.tap != "result_norm" else "output_norm"
    prefix = "" if op.tap == "result_norm" else f"blk.{op.layer}."
    if op.tap == "result_norm":
        x = op.taps[f"l_out-{op.file.hyper.layers - 1}"]
    elif op.word == "attn_norm":
        x = op.taps["embd"] if op.layer == 0 else op.taps[f"l_out-{op.layer - 1}"]
    else:
        x = op.of("ffn_inp") if op.word == "ffn_norm" else op.of(op.word.replace("normed", "proj"))
    w = np.asarray(op.file[f"{prefix}{stem}.weight"], np.float64)
    b = op.file.tensors.get(f"{prefix}{stem}.bias")
    rows = np.asarray(x, np.float64).reshape(-1, w.size)
    if op.file.hyper.layer_norm:
        rows = rows - rows.mean(axis=1, keepdims=True)
    return rows, w, np.zeros(w.size) if b is None else np.asarray(b, np.float64)


def by(op: Op, size: Callable[[Array, float], Array], weight: Callable[[Array], Array] = lambda w: w) -> bool:
    """Whether rows are divided by size(rows, epsilon), with another weight."""
    x, w, b = normed(op)
    return op.are(x / size(x, op.file.hyper.eps) * weight(w) + b)


def square(x: Array) -> Array:
    return np.mean(x * x, axis=1, keepdims=True)


def root(x: Array, eps: float) -> Array:
    return np.sqrt(square(x) + eps)


def least(op: Op, said: str) -> bool:
    least_square, added = op.fact.values
    told = np.isclose(float(said), least_square, rtol=1e-3)
    return bool(told) and by(op, lambda x, eps: np.sqrt(np.maximum(square(x), least_square) + added))


def own_epsilon(op: Op, said: str, right: str) -> bool:
    """What is added to a mean square, where that is large."""
    x, w, _ = normed(op)
    factors = (op.r.reshape(x.shape) * x * w).sum(1) / ((x * w) ** 2).sum(1)
    added = float(np.quantile((factors**-2.0 - square(x)[:, 0])[np.argsort(square(x)[:, 0])[-2:]], 0.5))
    size = float(square(x).max())
    return abs(added - float(said)) <= 1e-3 * size and np.isclose(float(right), op.file.hyper.eps, rtol=1e-2)


def summed(op: Op, first: str, last: str, count: str) -> bool:
    a, b = int(first), int(last) + 1
    return by(op, lambda x, eps: np.sqrt((x[:, a:b] ** 2).sum(1, keepdims=True) / int(count) + eps))


def ordered(op: Op, source: Array) -> bool:
    return by(op, root, lambda w: w[source])


def some_weight(op: Op, where: str | None) -> bool:
    """One weight for all tokens, by the median over them."""
    x, w, b = normed(op)
    plain = x / root(x, op.file.hyper.eps)
    found = np.median((op.r.reshape(x.shape) - b) / np.where(plain == 0, 1.0, plain), axis=0)
    other = np.abs(found - w) > 1e-3 * np.sqrt(np.mean(w**2))
    is_told = where is None or set(np.flatnonzero(other)) == set(op.fact.values)
    return is_told and op.are(plain * found + b)


def one_size(op: Op, number: str, row: str | None) -> bool:
    exact = op.fact.values[0]
    x, eps = normed(op)[0], op.file.hyper.eps
    is_right = row is None or np.isclose(root(x, eps)[int(row), 0], exact, rtol=1e-3)
    return bool(is_right) and np.isclose(float(number), exact, rtol=1e-3) and by(op, lambda x, eps: np.array(exact))


def magnitude(op: Op, which: str, plus: str | None) -> bool:
    size = np.mean if which == "mean" else np.max
    return by(op, lambda x, eps: size(np.abs(x), axis=1, keepdims=True) + float(plus or 0))


def left_out(op: Op, tokens: str | None) -> bool:
    """Those tokens hold what the norm read; all others are right."""
    x = normed(op)[0].reshape(op.r.shape)
    said = np.isin(np.arange(len(op.r)), op.fact.values if tokens else range(len(op.r)))
    listed = numbers(re.sub(r" and \d+ more", "", tokens)) if tokens else []
    return set(listed) <= set(op.fact.values) and op.are(np.where(said.reshape(-1, *[1] * (x.ndim - 1)), x, op.e))


def twice(op: Op) -> bool:
    x, w, b = normed(op)
    eps = op.file.hyper.eps
    once = x / root(x, eps) * w + b
    return op.are(once / root(once, eps) * w + b)


def weight_first(op: Op) -> bool:
    x, w, b = normed(op)
    return op.are(x * w / root(x * w, op.file.hyper.eps) + b)


SIXTEEN = {"float16": half, "bfloat16": bfloat}
STEPS = {
    "mean square": lambda ms, eps, r: np.sqrt(r(ms) + eps),
    "mean square plus epsilon": lambda ms, eps, r: np.sqrt(r(ms + eps)),
    "root mean square": lambda ms, eps, r: r(np.sqrt(ms + eps)),
    "factor": lambda ms, eps, r: 1 / r(1 / np.sqrt(ms + eps)),
}


def norm_in_16_bits(op: Op, words: str, kind: str) -> bool:
    rounded = SIXTEEN[kind]
    return by(op, lambda x, eps: STEPS[words](square(x), eps, lambda y: rounded(y.astype(np.float32)).astype(float)))
