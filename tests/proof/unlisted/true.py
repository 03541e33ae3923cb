"""Whether what is read back of an op is true: each sentence is carried out on the op's inputs, and held to its values.

The checks are written for the sentences, and share nothing with the code that found them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from proof.strangers.arithmetic import bfloat, half, sigmoid, silu
from proof.strangers.engine import is_scores
from proof.strangers.model import File

Array = np.ndarray
SLACK = 1e-6  # of a tensor's rms, that no check asks for


@dataclass(frozen=True)
class Op:
    """A tap as an engine recorded it, ``right`` as a right engine computes it from the same inputs, and all taps."""

    file: File
    tap: str
    recorded: Array
    right: Array
    taps: Mapping[str, Array]
    fact: Any

    @property
    def r(self) -> Array:
        return np.asarray(self.recorded, np.float64)

    @property
    def e(self) -> Array:
        return np.asarray(self.right, np.float64).reshape(self.recorded.shape)

    @property
    def layer(self) -> int:
        return int(self.tap.rsplit("-", 1)[1])

    @property
    def word(self) -> str:
        return self.tap.rsplit("-", 1)[0]

    def of(self, word: str, shape: Any = None) -> Array:
        """A tap of this layer, or of none."""
        name = word if word in self.taps else f"{word}-{self.layer}"
        x = np.asarray(self.taps[name], np.float64)
        return x if shape is None else x.reshape(shape)

    def are(self, values: Array, room: float = 0.0) -> bool:
        """Whether the recorded values are these: none is off by more than half of the error's size."""
        r, e = self.r, self.e
        if is_scores(self.tap):
            seen = np.tri(r.shape[1], r.shape[2], dtype=bool)
            r, e, values = (np.where(seen, x, 0.0) for x in (r, e, values))
        size = np.sqrt(np.mean(e**2)) or 1.0
        error = np.sqrt(np.mean((r - e) ** 2))
        return bool(np.abs(r - values.reshape(r.shape)).max() <= 0.5 * error + (SLACK + room) * size)


# -- norms ---------------------------------------------------------------------------------------------------------


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


# -- RoPE ----------------------------------------------------------------------------------------------------------


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


def numbers(text: str) -> list[int]:
    runs = re.findall(r"(\d+)(?: to (\d+))?", text)
    return [n for first, last in runs for n in range(int(first), int(last or first) + 1)]


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
        if match := re.fullmatch(r"(-?\d+) to (-?\d+)", part):
            out += range(int(match[1]), int(match[2]) + 1)
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


# -- softmax -------------------------------------------------------------------------------------------------------


def scores(op: Op) -> tuple[Array, Array]:
    """Scores [head, query, key] and what is seen of them; a router's as one head."""
    if op.word == "kq_soft_max":
        x = op.of("kq")
        return x, np.broadcast_to(np.tri(x.shape[1], x.shape[2], dtype=bool), x.shape)
    x = op.of("ffn_moe_logits")[None]
    return x, np.ones(x.shape, bool)


def right_scale(op: Op) -> float:
    return op.file.hyper.dim**-0.5 if op.word == "kq_soft_max" else 1.0


def powers(op: Op, scale: Any) -> Array:
    """exp below the row's largest of those that the recorded values see."""
    x, seen = scores(op)
    seen = seen & (op.r.reshape(x.shape) > 0)
    x = np.where(seen, x * scale, -np.inf)
    return np.where(seen, np.exp(x - x.max(axis=-1, keepdims=True, initial=-1e300)), 0.0)


def within_rows(op: Op, scale: Any) -> bool:
    """Whether a row's values are such powers, whatever they sum to."""
    p = powers(op, scale)
    total = op.r.reshape(p.shape).sum(-1, keepdims=True)
    return op.are((p / np.maximum(p.sum(-1, keepdims=True), 1e-300) * total).reshape(op.r.shape))


def head_scales(op: Op, values: str, right: str) -> bool:
    told = [float(value) for value in values.split(", ")]
    scale = np.array(op.fact.values)[:, None, None]
    near = np.allclose(told, op.fact.values, rtol=1e-3) and np.isclose(float(right), right_scale(op), rtol=1e-3)
    return near and within_rows(op, scale)


def one_scale(op: Op, value: str, right: str) -> bool:
    near = np.isclose(float(value), op.fact.values[0], rtol=1e-3) and np.isclose(
        float(right), right_scale(op), rtol=1e-3
    )
    return near and within_rows(op, op.fact.values[0])


def row_scales(op: Op, low: str, high: str, right: str) -> bool:
    values = op.fact.values
    return np.isclose(min(values), float(low), rtol=1e-3) and np.isclose(max(values), float(high), rtol=1e-3)


def sum_plus(op: Op, count: str) -> bool:
    p = powers(op, right_scale(op))
    return op.are((p / (p.sum(-1, keepdims=True) + op.fact.values[0])).reshape(op.r.shape)) and np.isclose(
        float(count), op.fact.values[0], rtol=1e-3
    )


def sum_lacks(op: Op, words: str, spared: str | None) -> bool:
    p = powers(op, right_scale(op))
    lost = lost_keys(words, p)
    lost = lost & ((p > 0).sum(-1, keepdims=True) > 1) if spared else lost
    return op.are((p / np.where(lost, 0.0, p).sum(-1, keepdims=True)).reshape(op.r.shape))


def lost_keys(words: str, p: Array) -> Array:
    """The keys that words speak about, [head, query, key]."""
    key = np.arange(p.shape[-1])
    if words == "each query's own key":
        return np.broadcast_to(np.eye(*p.shape[1:], dtype=bool), p.shape)
    if match := re.fullmatch(r"key (\d+)", words):
        return np.broadcast_to(key == int(match[1]), p.shape)
    places = {"the first key": 0, "the first expert": 0, "the last expert": p.shape[-1] - 1}
    if words in places:
        return np.broadcast_to(key == places[words], p.shape)
    return key == p.argmax(-1)[..., None]


def sum_counts(op: Op, count: str, in_all: bool) -> bool:
    x, seen = scores(op)
    top = np.where(seen, x * right_scale(op), -np.inf).max(-1, keepdims=True)
    n = int(count) - (seen.sum(-1, keepdims=True) if in_all else 0)
    p = powers(op, right_scale(op))
    return op.are((p / (p.sum(-1, keepdims=True) + n * np.exp(-top))).reshape(op.r.shape))


def unseen(op: Op, key: str, queries: str, heads: str | None) -> bool:
    some = range(len(op.r)) if not heads else numbers(heads)
    queries_said = numbers(re.sub(r" and \d+ more", "", queries))
    values = op.r[list(some)][:, :, int(key)]
    return not values[:, queries_said].any() and bool((op.e[list(some)][:, :, int(key)][:, queries_said] > 0).all())


def cut(op: Op, bound: str) -> bool:
    x, seen = scores(op)
    x = np.where(seen, x * right_scale(op), -np.inf)
    below = x.max(-1, keepdims=True) - x
    values = op.r.reshape(x.shape)
    return not values[seen & (below > float(bound))].any() and bool((values[seen & (below <= float(bound))] > 0).all())


def window(op: Op, count: str, heads: str | None) -> bool:
    some = list(range(len(op.r))) if not heads else numbers(heads)
    q, k = np.indices(op.r.shape[1:])
    far = q - k >= int(count)
    return not op.r[some][:, far].any() and bool(op.r[some][:, (q >= k) & ~far].all())


def distance(op: Op, values: str) -> bool:
    x, seen = scores(op)
    q, k = np.indices(x.shape[1:])
    y = np.where(seen, x * right_scale(op) + np.array(op.fact.values)[:, None, None] * (q - k), -np.inf)
    p = np.exp(y - y.max(-1, keepdims=True))
    told = np.allclose([float(value) for value in values.split(", ")], op.fact.values, rtol=1e-3, atol=1e-4)
    return told and op.are(p / p.sum(-1, keepdims=True) * op.r.sum(-1, keepdims=True))


# -- attention's output --------------------------------------------------------------------------------------------


def mixed(op: Op, p: Array | None = None, v: Array | None = None, reads: Any = None) -> Array:
    """Sums [token, head * dim] of V's rows."""
    p, v = op.of("kq_soft_max") if p is None else p, values_of(op, op.layer) if v is None else v
    group = len(p) // v.shape[1]
    heads = [v[:, h // group if reads is None else reads[h]] for h in range(len(p))]
    return np.concatenate([p[h] @ heads[h] for h in range(len(p))], axis=1)


def values_of(op: Op, layer: int) -> Array:
    v = np.asarray(op.taps[f"Vcur_proj-{layer}"], np.float64)
    return v.reshape(len(v), -1, op.file.hyper.dim)


def v_heads(op: Op, last: str, was: str, right: str) -> bool:
    reads, should = ([int(n) for n in text.split(", ")] for text in (was, right))
    group = op.file.hyper.heads // op.file.hyper.kv_heads
    is_right = should == [h // group for h in range(int(last) + 1)]
    return is_right and len(reads) == op.file.hyper.heads and op.are(mixed(op, reads=reads))


def head_places(op: Op, words: str) -> bool:
    places, p = np.array(op.fact.values), op.of("kq_soft_max")
    told = all(places[int(a)] == int(b) for a, b in re.findall(r"place (\d+) holds head (\d+)", words))
    group = op.file.hyper.heads // op.file.hyper.kv_heads
    return told and op.are(mixed(op, p=p[places], reads=[int(h) // group for h in places]))


def value_lacks(op: Op, words: str, spared: str | None) -> bool:
    p = op.of("kq_soft_max")
    lost = lost_keys(words.replace("the key of the largest weight", "the largest"), p)
    lost = lost & ((p > 0).sum(-1, keepdims=True) > 1) if spared else lost
    return op.are(mixed(op, p=np.where(lost, 0.0, p)))


def not_rescaled(op: Op, size: str, also: str | None) -> bool:
    """The loop itself, key by key."""
    q, k, p = op.of("kq") * op.file.hyper.dim**-0.5, int(size), op.of("kq_soft_max")
    weights = np.zeros(p.shape)
    for h, t in np.ndindex(p.shape[:2]):
        most, total, row = -np.inf, 0.0, q[h, t, : t + 1]
        for start in range(0, t + 1, k):
            block = row[start : start + k]
            new = max(most, float(block.max()))
            total = total * (1.0 if also else np.exp(most - new)) + np.exp(block - new).sum()
            weights[h, t, start : start + k][: len(block)] = np.exp(block - new)
            most = new
        weights[h, t] /= total
    return op.are(mixed(op, p=weights))


def rows_for_rows(op: Op, rows: str, sources: str) -> bool:
    v, was = (values_of(op, op.layer) for _ in range(2))
    v[[int(n) for n in rows.split(", ")]] = was[[int(n) for n in sources.split(", ")]]
    return op.are(mixed(op, v=v))


def other_rows(op: Op, rows: str, layer: str | None) -> bool:
    v = values_of(op, op.layer)
    v[numbers(rows)] = 0.0 if layer is None else values_of(op, int(layer))[numbers(rows)]
    return op.are(mixed(op, v=v))


def rows_times(op: Op, rows: str, factor: str) -> bool:
    v = values_of(op, op.layer)
    v[numbers(rows)] *= op.fact.values[0]
    return np.isclose(float(factor), op.fact.values[0], rtol=1e-3) and op.are(mixed(op, v=v))


# -- activation, sums, lookup, router ------------------------------------------------------------------------------


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
    found = re.findall(r"(?:(-?[\d.e-]+) )?([a-zA-Z_]+(-\d+)?)(\[t[+-]1\])?", said) if said != "zero" else []
    for count, name, _, shift in found:
        x = np.asarray(op.taps[name], np.float64).reshape(op.r.shape)
        n = np.arange(len(x)) + (int(shift[2:-1]) if shift else 0)
        total += float(count or 1) * x[np.clip(n, 0, len(x) - 1)]
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


# -- products ------------------------------------------------------------------------------------------------------

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


# -- scores --------------------------------------------------------------------------------------------------------


def scored(op: Op, k: Array | None = None, heads: Sequence[int] | None = None) -> Array:
    """Scores [head, query, key] of the recorded Q and K, of other rows of K or other heads of it."""
    h = op.file.hyper
    q, own = op.of("Qcur_rope", (-1, h.heads, h.dim)), op.of("Kcur_rope", (-1, h.kv_heads, h.dim))
    k = own if k is None else k
    reads = np.arange(h.heads) // (h.heads // h.kv_heads) if heads is None else np.array(heads)
    return np.einsum("thd,shd->hts", q, k[:, reads])


def key_rows(op: Op) -> Array:
    h = op.file.hyper
    return op.of("Kcur_rope", (-1, h.kv_heads, h.dim))


def rows_late(op: Op, first: str, last: str, where: str) -> bool:
    k = key_rows(op)
    rows = np.arange(len(k))
    some = (rows >= int(first)) & (rows <= (len(k) - 1 if last == "on" else int(last.removeprefix("to "))))
    return op.are(scored(op, k[np.where(some, rows + (-1 if where == "before" else 1), rows)]))


def keys_for_keys(op: Op, were: str, instead: str) -> bool:
    k, rows = key_rows(op), np.arange(len(key_rows(op)))
    rows[numbers(were)] = numbers(instead)
    return op.are(scored(op, k[rows]))


def k_heads(op: Op, last: str, read: str, right: str) -> bool:
    return op.are(scored(op, heads=numbers(read))) and np.allclose(scored(op, heads=numbers(right)), scored(op))


def own_row(op: Op) -> bool:
    every = scored(op)
    own = np.einsum("htt->ht", every)
    return op.are(np.broadcast_to(own[..., None], every.shape))


def leaking(op: Op, score: str | None, more: str | None) -> bool:
    """The whole softmax, hidden keys and all."""
    h = op.file.hyper
    x = op.of("kq") / np.sqrt(h.dim)
    n = np.arange(x.shape[-1])
    value, told = op.fact.values[0], float(score or more or 0)
    hidden = value if score else x + value
    x = np.where(n[None] > n[:, None], hidden, x)
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    p = e / e.sum(axis=-1, keepdims=True)
    return bool(np.isclose(told, value, rtol=1e-3) and np.abs(op.r - p).max() <= 1e-5 * p.max())


def turned_values(op: Op) -> bool:
    """V rotated pair by pair, by angles told from the metadata."""
    h = op.file.hyper
    v = values_of(op, op.layer)
    theta = np.arange(len(v))[:, None] * h.base ** (-2.0 * np.arange(h.dim // 2) / h.dim)
    c, s, out = np.cos(theta)[:, None], np.sin(theta)[:, None], v.copy()
    first, second = (
        (slice(0, None, 2), slice(1, None, 2)) if h.pairs else (slice(0, h.dim // 2), slice(h.dim // 2, None))
    )
    out[..., first] = v[..., first] * c - v[..., second] * s
    out[..., second] = v[..., second] * c + v[..., first] * s
    return op.are(mixed(op, v=out))


def shifted_values(op: Op, by: str, where: str) -> bool:
    """All but the channels that come from beyond the memory."""
    h, n = op.file.hyper, int(by)
    v = values_of(op, op.layer)
    moved = np.roll(v.reshape(-1), -n if where == "further on" else n).reshape(v.shape)
    mine, theirs = (x.reshape(-1, h.heads, h.dim)[..., n:-n] for x in (mixed(op, v=moved), op.r))
    return bool(np.abs(mine - theirs).max() <= 1e-4 * np.abs(theirs).max())


_HEADS = r"(?:, in heads? (.*))?"
_PAIRS = r"pairs? (\d+)(?: to (\d+))?"
_KEYS = r"(each query's own key|the first key|the key of the largest weight|key \d+)"
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


CHECKS: dict[str, Callable[..., bool]] = {
    r"its sum of squares is divided by (\d+), where (\d+) is right": lambda op, n, right: by(
        op, lambda x, eps: np.sqrt((x * x).sum(axis=1, keepdims=True) / int(n) + eps)) and int(right) == op.r.shape[-1],
    r"each row's (.*) is rounded to (b?float16)": norm_in_16_bits,
    r"its angles are rounded to multiples of 1/(\d+)" + _HEADS: stepped_angles,
    r"its weights are ((?:rounded|cut off) to b?float16)": in_16_bits,
    r"the weights of inputs (\d+) to (\d+) count (\S+) times": inputs_scaled,
    r"the weights of inputs (\d+) to (\d+) have another scale in each output, from (\S+) to (\S+) times":
        inputs_scaled_apart,
    r"from key (\d+) (on|to \d+) a score reads K's row of the token (before|after)": rows_late,
    r"in place of K's rows? (.*) it reads rows? (.*)": keys_for_keys,
    r"heads 0 to (\d+) read the K heads (.*), where (.*) are right": k_heads,
    r"every score of a query reads K's row of that query's own token": own_row,
    r"keys after a query are not hidden: they have (?:the score (\S+)|(\S+) added to their scores)": leaking,
    r"each token's output is added to those of all tokens before it": lambda op: op.are(np.cumsum(op.e, axis=0)),
    r"the rows of V that it reads are rotated by their positions, as K's are": turned_values,
    r"V is read from (\d+) values? (further on|before) in memory": shifted_values,
    r"each row is divided by sqrt\(mean square \+ (\S+)\), where (\S+) is right": lambda op, eps, right: by(
        op, lambda x, _: np.sqrt(square(x) + op.fact.values[0])),
    r"each row's mean square counts as at least (\S+)": least,
    r"its epsilon is (\S+), where (\S+) is right": own_epsilon,
    r"each row is divided by its mean square to the power (\S+), where 0.5 is right": lambda op, p: by(
        op, lambda x, eps: (square(x) + eps) ** op.fact.values[0]) and np.isclose(
            float(p), op.fact.values[0], rtol=1e-3),
    r"its mean square is of channels (\d+) to (\d+) alone, divided by (\d+)": summed,
    r"its weight is (left out|\S+\.weight)": lambda op, name: by(
        op, root, lambda w: np.ones(len(w)) if name == "left out" else np.asarray(op.file[name], np.float64)),
    r"its weight is the file's plus (\S+)": lambda op, c: by(op, root, lambda w: w + op.fact.values[0]) and np.isclose(
        float(c), op.fact.values[0], rtol=1e-3),
    r"its weight is the file's to the power (\S+)": lambda op, p: by(op, root, lambda w: w ** op.fact.values[0]),
    r"its weight is ([01]) in channels (\d+) to (\d+)": lambda op, value, a, b: by(op, root, lambda w: np.where(
        (np.arange(len(w)) >= int(a)) & (np.arange(len(w)) <= int(b)), float(value), w)),
    r"its weight is in another order: .*": lambda op: ordered(op, np.array(op.fact.values)),
    r"its weight is another than the file's( in channels .*)?, the same for every token": some_weight,
    r"it is applied twice, weight and all": twice,
    r"all rows are divided by one number, (\S+?)(?:, which is right in row (\d+))?": one_size,
    r"its mean square is of one channel in (\d+) alone, from channel (\d+) on": lambda op, step, first: by(
        op, lambda x, eps: np.sqrt(square(x[:, int(first) :: int(step)]) + eps)),
    r"each row is divided by its (mean|largest) magnitude(?: plus (\S+))?, where its root mean square is right":
        magnitude,
    r"it is left out(?: in tokens? (.*))?: its input goes on": left_out,
    r"its rows are multiplied by the weight first, and normalised then": weight_first,
    r"the rows(?: of heads? (.*?))? are rotated by the positions (.*)": by_positions,
    r"the rows(?: of heads? (.*?))? are rotated by their positions times (\S+)": by_times,
    rf"its frequencies are rounded to float16{_HEADS}": lambda op, heads: by_frequencies(
        op, half(frequencies(op).astype(np.float32)).astype(float), heads),
    rf"its frequencies are those of base (\S+?)(?:, where (\S+?) is right)?{_HEADS}": by_base,
    rf"its angles are rounded to (float16|bfloat16){_HEADS}": rounded_angles,
    rf"by their frequencies (.*?){_HEADS}": lambda op, words, heads: pair_order(op, words),
    rf"(?:all frequencies|the frequenc(?:ies|y) of {_PAIRS}) (?:are|is) (\S+) times what (?:they|it) should be{_HEADS}":
        some_frequencies,
    rf"a position turns (.*?)(?: and \d+ more)?{_HEADS}": other_frequencies,
    rf"(?:all pairs|{_PAIRS}) comes? out (\S+) times as long as (?:they|it) should{_HEADS}": long_pairs,
    rf"the (first|second) value of each pair is made of the other one's new value{_HEADS}": in_place,
    r"(?:key|expert)s whose scaled score is more than (\S+) below the row's largest get nothing": cut,
    r"queries see no more than the last (\d+) keys(?:, in heads (.*))?": window,
    r"key (\d+) is not seen by quer(?:y|ies) (.*?)(?:, in heads (.*))?": unseen,
    r"scores are multiplied by (.*) in heads 0 to \d+, where (\S+) is right": head_scales,
    r"scores are multiplied by (\S+), where (\S+) is right": one_scale,
    r"each row multiplies scores by a factor of its own, from (\S+) to (\S+), where (\S+) is right": row_scales,
    r"to scores is added the distance from key to query times (.*) in heads 0 to \d+": distance,
    r"its sum leaves out (.*?)(, where there is another (?:key|expert))?": sum_lacks,
    r"its sum is (\S+) too large, where the largest term is 1": sum_plus,
    r"its sum counts (\d+) more with a score of 0": lambda op, n: sum_counts(op, n, False),
    r"its sum counts (\d+) (?:key|expert)s in every row, those that are not there with a score of 0":
        lambda op, n: sum_counts(op, n, True),
    r"heads 0 to (\d+) read the V heads (.*), where (.*) are right": v_heads,
    r"its heads are in another order: (.*)": head_places,
    rf"the value of {_KEYS} is not added(, where there is another key)?": value_lacks,
    r"what was summed is not rescaled where the largest score grows, from one block of (\d+) keys? to the next"
    r"(, and nor is its sum)?": not_rescaled,
    r"in place of V's rows? ([\d, ]+) it reads rows? ([\d, ]+)": rows_for_rows,
    r"in place of V's rows? (.*) it reads layer (\d+)'s": other_rows,
    r"it reads V's rows? (.*) times (\S+)": rows_times,
    r"it reads zeros for V's rows? (.*)": lambda op, rows: other_rows(op, rows, None),
    r"its (gate|up) is cut off (above|below|beyond) (\S+)": clamped,
    r"it is (.*) \* up, where silu\(gate\) \* up is right": lambda op, name: op.are(
        FUNCTIONS[name](gate_up(op)[0]) * gate_up(op)[1]),
    r"silu\(\S+\) is another function, off by up to (\S+)": lambda op, off: bool(
        (np.abs(op.r - silu(gate_up(op)[0]) * gate_up(op)[1]) <= 1.06 * float(off) * np.abs(gate_up(op)[1])
         + 1e-5 * np.sqrt(np.mean(op.e**2))).all()),
    r"it is gate \* sigmoid\((\S+) \* gate\) \* up, where the slope 1 is right": sloped,
    r"it is silu\((\S+)\) \* \((?:(\S+) \* )?up \+ (\S+)\), where up alone is right": of_up,
    r"where (\S+) (<=|>=) (\S+), it is (.*) \* up": named_beyond,
    r"where (\S+) (<=|>=) (\S+), silu\((\S+)\) is another function, off by up to (\S+)": off_beyond,
    r"(in channels \d+ to \d+ |from token 1 on )?it is (.*), where (.* \+ .*) is right": terms,
    r"it chooses the experts of ranks? (.*), where (.*) (?:is|are) right": ranked,
    r"it never chooses expert (\d+)": never,
    r"weights are divided by their sum plus (\S+)": lambda op, more: shared(op, more, None),
    r"weights are multiplied by (\S+), whatever their sum": lambda op, times: shared(op, None, times),
    r"the chosen experts count (.*) times as much as their weights": counted,
    r"its sums (leave out|count twice) inputs? (\d+)(?: to (\d+))?": inputs_summed,
    r"(\S+) is transposed in tiles of (\d+)": tiles,
    r"its inputs are in another order: (.*)": input_order,
    r"its inputs are cut off beyond (\S+)": input_cut,
    r"(in channels \d+ to \d+ )?it multiplies by (?:rows (\d+) to (\d+) of )?(\S+)": rows_of,
}  # fmt: skip


def is_true(op: Op, tokens: tuple[int, ...]) -> bool:
    """Whether what a fact says of an op holds. Every sentence has one check."""
    if match := re.fullmatch(r"(in channels \d+ to \d+ )?it looks up (.*)", op.fact.says):
        return looked_up(op, match[1], match[2], tokens)
    found = [(check, match) for words, check in CHECKS.items() if (match := re.fullmatch(words, op.fact.says))]
    assert len(found) == 1, f"a sentence without a check of its own: {op.fact.says}"
    check, match = found[0]
    return check(op, *match.groups())
