"""Checks of what is read back of RoPE."""

from __future__ import annotations

import re

import numpy as np

from proof.strangers.arithmetic import bfloat, half
from proof.unlisted.truth.op import Op, numbers

Array = np.ndarray


def pairs(op: Op, x: Array) -> Array:
    """[token, head, dim] as complex pairs."""
    x = x.reshape(len(x), -1, op.file.hyper.dim)
    half_of = op.file.hyper.dim // 2
    return x[..., 0::2] + 1j * x[..., 1::2] if op.file.hyper.pairs else x[..., :half_of] + 1j * x[..., half_of:]


def frequencies(op: Op) -> Array:
    n = op.file.hyper.n_rot
    return op.file.hyper.base ** (-2.0 * np.arange(n // 2) / n)


def before(op: Op) -> Array:
    side = op.word[0]
    normed_name = f"{side}cur_normed-{op.layer}"
    return pairs(op, np.asarray(op.taps.get(normed_name, op.taps[f"{side}cur_proj-{op.layer}"]), np.float64))


def heads_of(op: Op, words: str | None) -> list[int]:
    every = range(op.recorded.shape[1])
    return list(every) if not words else numbers(words)


def turned(op: Op, table: Array, heads: list[int], lengths: bool = True) -> bool:
    """Whether some heads are turned by a table [token, pair]; with whatever lengths, unless these are told."""
    x, y, e = before(op)[:, heads], pairs(op, op.r)[:, heads], pairs(op, op.e)[:, heads]
    unit = np.exp(1j * table)[:, None]
    size = np.abs(y).sum(axis=1, keepdims=True) / np.abs(x).sum(axis=1, keepdims=True) if lengths else 1.0
    error = np.sqrt(np.mean(np.abs(y - e) ** 2))
    return bool(np.abs(y - x * unit * size).max() <= 0.7 * error + 1e-6)


def positions_of(text: str) -> list[float]:
    out: list[float] = []
    for part in text.split(", then "):
        if match := re.fullmatch(r"(-?[\d.]+) to (-?[\d.]+)", part):
            first, last = float(match[1]), float(match[2])
            out += [first + n for n in range(round(last - first) + 1)]
        elif match := re.fullmatch(r"(\d+) times (-?\d+)", part):
            out += int(match[1]) * [float(match[2])]
        else:
            out += [float(part)]
    return out


def by_positions(op: Op, heads: str | None, text: str) -> bool:
    positions = np.array(positions_of(text))
    return len(positions) == len(op.r) and turned(op, positions[:, None] * frequencies(op), heads_of(op, heads))


def by_times(op: Op, heads: str | None, times: str) -> bool:
    plain = np.arange(len(op.r))[:, None] * frequencies(op)
    return np.isclose(op.fact.values[0], float(times), rtol=1e-3) and turned(
        op, op.fact.values[0] * plain, heads_of(op, heads)
    )


def unturned(op: Op, heads: str | None) -> bool:
    return turned(op, np.zeros((len(op.r), len(frequencies(op)))), heads_of(op, heads))


def by_frequencies(op: Op, found: Array, heads: str | None = None) -> bool:
    return turned(op, np.arange(len(op.r))[:, None] * found, heads_of(op, heads))


def some_frequencies(op: Op, a: str | None, b: str | None, times: str, heads: str | None) -> bool:
    """These pairs alone are held to it: others may be told in a sentence of their own."""
    f, which = frequencies(op), slice(None) if a is None else slice(int(a), int(b or a) + 1)
    x, y = before(op)[:, heads_of(op, heads)][..., which], pairs(op, op.r)[:, heads_of(op, heads)][..., which]
    turn = np.angle((y * x.conj()).sum(axis=1) * np.exp(-1j * np.arange(len(op.r))[:, None] * f[which] * float(times)))
    return bool(np.abs(turn).max() < 1e-2)


def other_frequencies(op: Op, said: str, heads: str | None) -> bool:
    """Those that are listed: what a position turns such a pair by."""
    told = re.findall(r"pair (\d+) by (\S+), where (\S+) is right", said)
    x, y = (side[:, heads_of(op, heads)] for side in (before(op), pairs(op, op.r)))
    turn = np.angle((y[1] * x[1].conj()).sum(axis=0))
    return bool(told) and all(
        abs(turn[int(i)] - float(by)) < 1e-3 + 1e-3 * abs(float(by))
        and np.isclose(frequencies(op)[int(i)], float(right), rtol=1e-3)
        for i, by, right in told
    )


def long_pairs(op: Op, a: str | None, b: str | None, times: str, heads: str | None) -> bool:
    which = slice(None) if a is None else slice(int(a), int(b or a) + 1)
    x, y = (np.abs(side[:, heads_of(op, heads)][..., which]) for side in (before(op), pairs(op, op.r)))
    e = np.abs(pairs(op, op.e)[:, heads_of(op, heads)][..., which])
    return bool(np.abs(y - float(times) * e).max() < 5e-3 * x.max())


def in_place(op: Op, which: str, heads: str | None) -> bool:
    angles, x = np.arange(len(op.r))[:, None] * frequencies(op), before(op)
    c, s = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x.real, x.imag
    if which == "second":
        new = a * c - b * s
        y = new + 1j * (b * c + new * s)
    else:
        new = b * c + a * s
        y = (a * c - new * s) + 1j * new
    some = heads_of(op, heads)
    return bool(np.abs(y - pairs(op, op.r))[:, some].max() < 1e-4 * np.abs(y).max())


def by_base(op: Op, base: str, right: str | None, heads: str | None) -> bool:
    """The printed base has six digits."""
    n = op.file.hyper.n_rot // 2
    is_right = right is None or np.isclose(float(right), op.file.hyper.base, rtol=1e-3)
    return bool(is_right) and by_frequencies(op, float(base) ** (-np.arange(n) / n), heads)


def rounded_angles(op: Op, kind: str, heads: str | None) -> bool:
    theta = (np.arange(len(op.r))[:, None] * frequencies(op)).astype(np.float32)
    return turned(op, (half if kind == "float16" else bfloat)(theta).astype(float), heads_of(op, heads))


def stepped_angles(op: Op, steps: str, heads: str | None) -> bool:
    theta, n = np.arange(len(op.r))[:, None] * frequencies(op), int(steps)
    return turned(op, np.round(theta * n) / n, heads_of(op, heads))


def pair_order(op: Op, words: str) -> bool:
    """An order whose words are checked elsewhere: the fact's own, where it is told to be rolled."""
    source = np.array(op.fact.values)
    match = re.fullmatch(r"the pairs are rolled: each is (\d+) places? (later|earlier)", words)
    told = np.roll(np.arange(len(source)), int(match[1]) * (1 if match[2] == "later" else -1)) if match else source
    return np.array_equal(source, told) and by_frequencies(op, frequencies(op)[source])
