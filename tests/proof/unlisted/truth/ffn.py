"""Checks of what is read back of activations, sums, lookups and routers."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from proof.strangers.arithmetic import sigmoid, silu
from proof.unlisted.truth.op import Op, numbers

Array = np.ndarray


def gate_up(op: Op) -> tuple[Array, Array]:
    moe = "moe_" if "moe" in op.word else ""
    return op.of(f"ffn_{moe}gate"), op.of(f"ffn_{moe}up")


def clamped(op: Op, name: str, side: str, value: str) -> bool:
    gate, up = gate_up(op)
    limit, exact = (np.minimum if side == "above" else np.maximum), op.fact.values[1]
    told = np.isclose(float(value), exact, rtol=1e-3, atol=1e-4)
    if side == "beyond":
        return bool(told) and op.are(silu(gate) * np.clip(up, -exact, exact))
    gate, up = (limit(gate, exact), up) if name == "gate" else (gate, limit(up, exact))
    return bool(told) and op.are(silu(gate) * up)


def sloped(op: Op, slope: str) -> bool:
    gate, up = gate_up(op)
    exact = op.fact.values[0]
    return np.isclose(float(slope), exact, rtol=1e-2) and op.are(gate * sigmoid(exact * gate) * up)


def of_up(op: Op, name: str, times: str | None, plus: str) -> bool:
    gate, up = gate_up(op)
    a, b = op.fact.values
    return np.allclose([float(times or 1), float(plus)], [a, b], rtol=1e-3, atol=1e-4) and op.are(
        silu(gate) * (a * up + b)
    )


FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "silu(-gate)": lambda x: silu(-x), "-silu(gate)": lambda x: -silu(x), "-silu(-gate)": lambda x: -silu(-x),
    "0": np.zeros_like, "gate": lambda x: x, "0.01 * gate": lambda x: 0.01 * x,
    "exp(gate) * gate": lambda x: np.exp(x) * x, "exp(gate) - 1": np.expm1,
    "gate * clip(gate / 6 + 1/2, 0, 1)": lambda x: np.maximum(np.minimum(x / 6 + 0.5, 1), 0) * x,
    "max(gate, 0)^2": lambda x: np.where(x > 0, x * x, 0), "gate / (1 + |gate|)": lambda x: x / (1 + np.abs(x)),
}  # fmt: skip


def beyond(op: Op, tap: str, side: str, bound: str) -> Array:
    """Where gate is beyond a bound that is printed with four digits."""
    gate, at = np.asarray(op.taps[tap], np.float64), float(bound)
    at += (1 if side == "<=" else -1) * 1e-3 * abs(at)
    return gate <= at if side == "<=" else gate >= at


def named_beyond(op: Op, tap: str, side: str, bound: str, name: str) -> bool:
    gate, up = gate_up(op)
    return op.are(np.where(beyond(op, tap, side, bound), FUNCTIONS[name](gate) * up, op.e))


def off_beyond(op: Op, tap: str, side: str, bound: str, of: str, off: str) -> bool:
    gate, up = gate_up(op)
    where, size = beyond(op, tap, side, bound), np.sqrt(np.mean(op.e**2))
    inside = np.abs(op.r - op.e)[~where].max() <= 1e-5 * size
    gap = np.abs(op.r - silu(gate) * up) - 1.06 * float(off) * np.abs(up)
    return of == tap and bool(inside) and float(gap[where].max()) <= 1e-5 * size


def terms(op: Op, where: str | None, said: str, right: str) -> bool:
    """The sum carried out, in those channels or from that token on; elsewhere all is right."""
    total = np.zeros_like(op.r)
    found = re.findall(r"(?:(-?[\d.e-]+) )?([a-zA-Z_]+(-\d+)?)(\[t[+-]1(?: or 0)?\])?", said) if said != "zero" else []
    for count, name, _, shift in found:
        x = np.asarray(op.taps[name], np.float64).reshape(op.r.shape)
        n = np.arange(len(x)) + (int(shift[2:4]) if shift else 0)
        there = (n >= 0) & (n < len(x)) | ("or 0" not in shift)
        total += float(count or 1) * np.where(there[:, None], x[np.clip(n, 0, len(x) - 1)], 0.0)
    if where and (match := re.fullmatch(r"in channels (\d+) to (\d+) ", where)):
        n = np.arange(op.r.shape[1])
        total = np.where((n >= int(match[1])) & (n <= int(match[2])), total, op.e)
    elif where:
        total = np.where(np.arange(len(op.r))[:, None] >= 1, total, op.e)
    plain = sum(np.asarray(op.taps[name], np.float64).reshape(op.r.shape) for name in right.split(" + "))
    return op.are(total, 1e-3) and bool(np.allclose(plain, op.e, atol=1e-5 * np.abs(op.e).max()))


def looked_up(op: Op, where: str | None, said: str, tokens: tuple[int, ...]) -> bool:
    some = numbers(where) if where else list(range(op.r.shape[1]))
    table, told = op.file["token_embd.weight"], re.findall(r"row (\d+) for id (\d+)", said)
    gaps = [
        np.abs(op.r[t] - table[int(row)])[some].max()
        for row, i in told
        for t in np.flatnonzero(np.array(tokens) == int(i))
    ]
    return bool(told) and max(gaps) < 1e-3 * np.abs(op.r).max()


def ranked(op: Op, said: str, right: str) -> bool:
    order = np.argsort(-op.of("ffn_moe_probs"), axis=-1, kind="stable")
    mine = np.sort(order[:, [n - 1 for n in numbers(said)]], axis=-1)
    return numbers(right) == list(range(1, op.r.shape[1] + 1)) and np.array_equal(mine, np.sort(op.r, axis=-1))


def never(op: Op, expert: str) -> bool:
    probs = op.of("ffn_moe_probs").copy()
    probs[:, int(expert)] = -1
    return np.array_equal(np.argsort(-probs, axis=-1, kind="stable")[:, : op.r.shape[1]], op.r)


def shared(op: Op, more: str | None, times: str | None) -> bool:
    w, value = op.of("ffn_moe_weights"), op.fact.values[0]
    told = np.isclose(float(more or times or 0), value, rtol=1e-3)
    return bool(told) and op.are(w / (w.sum(-1, keepdims=True) + value) if more else w * value)


def counted(op: Op, values: str) -> bool:
    times = np.array(op.fact.values)
    told = np.allclose([float(value) for value in values.split(", ")], times, rtol=1e-3)
    weights = op.of("ffn_moe_weights_norm") * times
    return told and op.are((op.of("ffn_moe_down") * weights[..., None]).sum(axis=1))


def _of_experts(op: Op) -> tuple[Array, Array, Array]:
    """Every expert's products with all rows, the choice, and the right values."""
    stem = {"ffn_moe_gate": "ffn_gate_exps", "ffn_moe_up": "ffn_up_exps"}[op.word]
    w = op.file[f"blk.{op.layer}.{stem}.weight"]
    every = np.einsum("eoi,ri->ero", np.asarray(w, np.float64), op.of("ffn_norm"))
    return every, op.of("ffn_moe_topk").astype(int), op.e.copy()


def expert_rows(op: Op, said: str) -> bool:
    """Rows of other tokens that experts multiplied."""
    every, chosen, made = _of_experts(op)
    for row, token, expert in re.findall(r"row (\d+) for token (\d+) \(expert (\d+)\)", said):
        place = chosen[int(token)] == int(expert)
        made[int(token), place] = every[int(expert), int(row)]
    return "more" in said or op.are(made)


def expert_matrices(op: Op, said: str) -> bool:
    """Experts that stood in for others."""
    every, chosen, made = _of_experts(op)
    for other, own in re.findall(r"expert (\d+) for (\d+)", said):
        for token, place in zip(*np.nonzero(chosen == int(own)), strict=True):
            made[token, place] = every[int(other), token]
    return op.are(made)
