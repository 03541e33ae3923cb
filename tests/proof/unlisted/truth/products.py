"""Checks of what is read back of products with weights."""

from __future__ import annotations

import re

import numpy as np

from proof.strangers.arithmetic import bfloat, half
from proof.unlisted.truth.op import Op, numbers

Array = np.ndarray


WEIGHTS = {
    "Qcur_proj": "attn_q",
    "Kcur_proj": "attn_k",
    "Vcur_proj": "attn_v",
    "attn_out": "attn_output",
    "ffn_gate": "ffn_gate",
    "ffn_up": "ffn_up",
    "ffn_out": "ffn_down",
    "ffn_moe_logits": "ffn_gate_inp",
}
READS = {"attn_out": "kqv_out", "ffn_out": "ffn_swiglu", "ffn_gate": "ffn_norm", "ffn_up": "ffn_norm",
         "ffn_moe_logits": "ffn_norm"}  # fmt: skip


def factors(op: Op) -> tuple[str, Array, Array]:
    """The weight's name, the weight [out, in] and the input [token, in]."""
    name = "output.weight" if op.tap == "result_output" else f"blk.{op.layer}.{WEIGHTS[op.word]}.weight"
    name = name if name in op.file else "token_embd.weight"
    x = op.taps["result_norm"] if op.tap == "result_output" else op.of(READS.get(op.word, "attn_norm"))
    return name, np.asarray(op.file[name], np.float64), np.asarray(x, np.float64).reshape(len(op.r), -1)


def changed(op: Op, change: Array) -> bool:
    """Whether the right values and a change of the product are what was recorded; weights may have few bits."""
    return op.are(op.e + change.reshape(op.e.shape))


def inputs_summed(op: Op, words: str, first: str, last: str | None) -> bool:
    _, w, x = factors(op)
    some = slice(int(first), int(last or first) + 1)
    return changed(op, (-1 if words == "leave out" else 1) * x[:, some] @ w[:, some].T)


def tiles(op: Op, name: str, size: str) -> bool:
    own, w, x = factors(op)
    n, out = int(size), w.copy()
    for i, j in np.ndindex(w.shape[0] // n, w.shape[1] // n):
        out[i * n : (i + 1) * n, j * n : (j + 1) * n] = w[i * n : (i + 1) * n, j * n : (j + 1) * n].T
    return own == name and changed(op, x @ (out - w).T)


def input_order(op: Op, words: str) -> bool:
    _, w, x = factors(op)
    source = np.array(op.fact.values)
    if match := re.fullmatch(r"of each block of (\d+), (.*)", words):
        each = np.array(numbers(match[2]))
        told = (np.arange(0, len(source), int(match[1]))[:, None] + each).ravel()
    else:
        told = source
    return np.array_equal(told, source) and changed(op, (x[:, source] - x) @ w.T)


def input_cut(op: Op, bound: str) -> bool:
    _, w, x = factors(op)
    exact = op.fact.values[0]
    return np.isclose(float(bound), exact, rtol=1e-3) and changed(op, (np.clip(x, -exact, exact) - x) @ w.T)


def rows_of(op: Op, where: str | None, first: str | None, last: str | None, name: str) -> bool:
    _, w, x = factors(op)
    rows = np.asarray(op.file[name], np.float64)
    rows = rows if first is None else rows[int(first) : int(last or 0) + 1]
    some = numbers(where) if where else list(range(len(w)))
    change = np.zeros((len(x), len(w)))
    change[:, some] = x @ (rows - w[some]).T
    return len(rows) == len(some) and changed(op, change)


def in_16_bits(op: Op, how: str) -> bool:
    _, w, x = factors(op)
    made = {"rounded to bfloat16": bfloat, "rounded to float16": half, "cut off to bfloat16": cut_off}[how]
    return changed(op, x @ (np.asarray(made(w.astype(np.float32)), np.float64) - w).T)


def cut_off(w: Array) -> Array:
    return (np.ascontiguousarray(w).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def inputs_scaled(op: Op, first: str, last: str, factor: str) -> bool:
    _, w, x = factors(op)
    some = slice(int(first), int(last) + 1)
    told = np.isclose(float(factor), op.fact.values[0], rtol=1e-3)
    return bool(told) and changed(op, (op.fact.values[0] - 1) * x[:, some] @ w[:, some].T)


def inputs_scaled_apart(op: Op, first: str, last: str, low: str, high: str) -> bool:
    """Each output has a factor of its own: the median over tokens."""
    _, w, x = factors(op)
    some = slice(int(first), int(last) + 1)
    part, error = x[:, some] @ w[:, some].T, op.r - op.e
    own = np.median(error / part, axis=0)
    told = np.allclose([float(low), float(high)], [1 + own.min(), 1 + own.max()], rtol=1e-2)
    return told and changed(op, part * own)
