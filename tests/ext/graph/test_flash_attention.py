"""Flash attention as CPUs compute it: each right kernel is a match however it rounds, and a wrong one is far beyond.

The kernels here are written from ggml's sources anew, one number after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from models.options import write_long

from llamadiff.engines.run_spec import Run
from llamadiff.ext.graph.backend import judge_graph
from llamadiff.ext.graph.check import Recomputed, replay
from llamadiff.ext.graph.op import Op, Operand
from llamadiff.judge.verdict import of_node
from llamadiff.llamacpp.request import Settings
from llamadiff.numerics import tolerances

HALF, SINGLE = np.float16, np.float32


@dataclass(frozen=True)
class Case:
    """q [head, t, d], k and v [kv, s, d] in float16, mask [t, s]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    mask: np.ndarray
    scale: float
    cap: float = 0.0

    def op(self) -> Op:
        sources = [Operand(self.q[None])]
        sources += [Operand(x[None].astype(SINGLE), "f16") for x in (self.k, self.v)]
        sources += [Operand(self.mask[None, None].astype(SINGLE), "f16")]
        shape = (1, self.q.shape[1], self.q.shape[0], self.v.shape[2])
        params = np.array([self.scale, 0, self.cap, 0], SINGLE).tobytes() + b"\0" * 48
        return Op("FLASH_ATTN_EXT", shape, "f32", params, tuple(sources))


def case(tokens: int, keys: int, width: int, cap: float = 0.0, heads: int = 4, seed: int = 0) -> Case:
    """The last ``tokens`` of ``keys`` look back; three more keys are padding."""
    rng = np.random.default_rng(seed)
    k, v = (rng.standard_normal((heads // 2, keys + 3, width)).astype(HALF) for _ in "kv")
    q = rng.standard_normal((heads, tokens, width)).astype(SINGLE)
    rows = np.arange(keys - tokens, keys)[:, None]
    mask = np.where(np.arange(keys + 3)[None] > rows, -np.inf, 0).astype(HALF)
    return Case(q, k, v, mask, 2 / np.sqrt(width), cap)


def by_row(c: Case, row) -> np.ndarray:
    """A kernel for one head and query, row(scores, values) -> [d], on all: [1, t, head, d]."""
    out = np.empty((1, c.q.shape[1], c.q.shape[0], c.v.shape[2]), SINGLE)
    for head, queries in enumerate(c.q):
        k, v = (x[head // (len(c.q) // len(c.k))].astype(SINGLE) for x in (c.k, c.v))
        for t, query in enumerate(queries):
            seen = np.isfinite(c.mask[t])
            scores = (k[seen] @ query.astype(HALF).astype(SINGLE)) * SINGLE(c.scale)
            scores = SINGLE(c.cap) * np.tanh(scores / SINGLE(c.cap)) if c.cap else scores
            out[0, t, head] = row(scores.astype(SINGLE), v[seen])
    return out


def key_by_key(step: int | None):
    """The sum in float16 after each key; in whole steps of ``step`` channels weights are in float16, and fused."""

    def row(scores: np.ndarray, values: np.ndarray) -> np.ndarray:
        total, size = _summed(scores, values, step)[1:]
        return total.astype(SINGLE) / size

    return lambda c: by_row(c, row)


def _summed(scores: np.ndarray, values: np.ndarray, step: int | None) -> tuple[SINGLE, np.ndarray, SINGLE]:
    width = values.shape[1]
    fused = width - width % step if step else 0
    total, peak, size = np.zeros(width, HALF), SINGLE(-np.inf), SINGLE(0)
    for score, value in zip(scores, values, strict=True):
        shrink, weight = SINGLE(1), SINGLE(1)
        if score > peak:
            shrink, peak = np.exp(peak - score), score
            total[:fused] *= HALF(shrink)
            total[fused:] = (total[fused:].astype(SINGLE) * shrink).astype(HALF)
        else:
            weight = np.exp(score - peak)
        exact = total[:fused].astype(float) + value[:fused].astype(float) * float(HALF(weight))
        total[fused:] = (total[fused:].astype(SINGLE) + value[fused:] * weight).astype(HALF)
        total[:fused] = exact.astype(HALF)
        size = size * shrink + weight
    return peak, total, size


def in_chunks(count: int):
    """Keys shared out among threads, whose sums are put together in float32."""

    def row(scores: np.ndarray, values: np.ndarray) -> np.ndarray:
        parts = [
            _summed(*some, None) for some in zip(*(np.array_split(x, count) for x in (scores, values)), strict=True)
        ]
        peak = max(part[0] for part in parts)
        factors = [np.exp(part[0] - peak) for part in parts]
        total = sum(part[1].astype(SINGLE) * factor for part, factor in zip(parts, factors, strict=True))
        return total / sum(part[2] * factor for part, factor in zip(parts, factors, strict=True))

    return lambda c: by_row(c, row)


def a_few_times(c: Case) -> np.ndarray:
    """Weights and the result in float16, the sum in float32: no kernel of ggml's, but of its precision."""

    def row(scores: np.ndarray, values: np.ndarray) -> np.ndarray:
        weights = np.exp(scores - scores.max())
        return ((weights / weights.sum()).astype(HALF).astype(SINGLE) @ values).astype(HALF).astype(SINGLE)

    return by_row(c, row)


def not_at_all(c: Case) -> np.ndarray:
    """Tiles in float32, queries not rounded."""
    k, v = (np.repeat(x, 2, axis=0).astype(SINGLE) for x in (c.k, c.v))
    scores = np.einsum("htd,hsd->hts", c.q, k) * SINGLE(c.scale)
    scores = SINGLE(c.cap) * np.tanh(scores / SINGLE(c.cap)) if c.cap else scores
    weights = np.exp(scores + c.mask - (scores + c.mask).max(axis=-1, keepdims=True))
    return np.einsum("hts,hsd->thd", weights / weights.sum(axis=-1, keepdims=True), v)[None]


def judged(c: Case, found: np.ndarray) -> tuple[str, Recomputed]:
    """As the nodes of a graph are."""
    rule = tolerances.rule_for(tolerances.RULES, "kqv", "FLASH_ATTN_EXT", "F32")
    best = replay(c.op(), found, enough=rule.match)
    assert best is not None
    match = rule.match + best.rounding
    return of_node(best.nmse, match).verdict, best


FOLLOWED = {
    "with float32 weights": key_by_key(None), "AVX512-FP16": key_by_key(128), "ARM": key_by_key(32),
    "any width": key_by_key(1),
}  # fmt: skip
SHAPES = {
    "one query": (1, 40, 128), "some": (6, 9, 64), "a rest of channels": (5, 30, 144), "many": (40, 63, 32),
}  # fmt: skip


@pytest.mark.parametrize("cap", [0.0, 1.5], ids=["", "capped"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel", FOLLOWED)
def test_a_kernel_that_rounds_at_each_key_is_followed(kernel, shape, cap):
    c = case(*SHAPES[shape], cap)
    found, best = judged(c, FOLLOWED[kernel](c))
    assert found == "match"
    assert best.nmse <= 1e-8  # a rounding that falls the other way here and there


UNFOLLOWED = {
    "two threads": (in_chunks(2), (1, 600, 64)), "five threads": (in_chunks(5), (1, 520, 128)),
    "weights and result": (a_few_times, (6, 9, 128)), "weights and result, far back": (a_few_times, (20, 300, 64)),
    "nothing": (not_at_all, (8, 8, 64)),
}  # fmt: skip


@pytest.mark.parametrize("kernel", UNFOLLOWED)
def test_a_kernel_that_rounds_elsewhere_is_a_match_too(kernel):
    compute, shape = UNFOLLOWED[kernel]
    c = case(*shape)
    found, best = judged(c, compute(c))
    assert found == "match"
    assert best.rounding <= shape[1] * 3 * tolerances.ROUNDING["f16"]


def test_tiles_are_held_to_float32():
    """64 queries or more: nothing is rounded, and rounding even a few times is not let pass."""
    c = case(70, 80, 64)
    found, best = judged(c, not_at_all(c))
    assert (found, best.rounding) == ("match", 0.0)
    assert best.nmse < 1e-13
    assert judged(c, a_few_times(c))[0] == "wrong"


def _roll(x: np.ndarray, axis: int) -> np.ndarray:
    return np.roll(x, 1, axis)


def _own(c: Case) -> np.ndarray:
    """Each query's own key."""
    seen = np.isfinite(c.mask).sum(axis=1, keepdims=True)
    return np.arange(c.mask.shape[1]) == seen - 1


FAULTS = {
    "another scale": lambda c: replace(c, scale=c.scale * 1.05),
    "no scale": lambda c: replace(c, scale=1.0),
    "a key missing": lambda c: replace(c, mask=np.where(np.arange(c.mask.shape[1]) == 3, -np.inf, c.mask)),
    "its own key missing": lambda c: replace(c, mask=np.where(_own(c), -np.inf, c.mask)),
    "a later key seen": lambda c: replace(c, mask=np.where(_roll(_own(c), 1), 0, c.mask)),
    "another head's keys": lambda c: replace(c, k=_roll(c.k, 0)),
    "another head's values": lambda c: replace(c, v=_roll(c.v, 0)),
    "values one key late": lambda c: replace(c, v=_roll(c.v, 1)),
    "capped": lambda c: replace(c, cap=3.0),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_is_far_beyond(fault, shape):
    c = case(*SHAPES[shape])
    for kernel in (key_by_key(None), key_by_key(128), a_few_times):
        found, best = judged(c, kernel(FAULTS[fault](c)))
        assert found == "wrong"
        assert best.nmse > 100 * best.rounding


def test_the_last_key_of_many_is_missed():
    """Where all weigh alike, one of 300 keys is a three-hundredth of the sum: still a thousand times the limit."""
    c = replace(case(4, 300, 64), scale=1e-3)
    missing = replace(c, mask=np.where(np.arange(c.mask.shape[1]) == 3, -np.inf, c.mask))
    found, best = judged(c, key_by_key(None)(missing))
    assert found == "wrong"
    assert best.nmse > 100 * best.rounding


@pytest.mark.parametrize(("name", "n_tokens"), [("llama", 7), ("llama", 64), ("llama", 530), ("gemma2", 63)])
def test_llama_cpp_is_right_on_this_machine(name, n_tokens, tmp_path):
    """Its kernels for few queries, for tiles, and for one query and many keys."""
    path = write_long(tmp_path / "m.gguf", name, "Q8_0", 600, layers=1)
    tokens = tuple(3 + 7 * i % 60 for i in range(n_tokens))
    result = judge_graph(path, Run(tokens=tokens, n_predict=2, settings=Settings(flash_attn=True)))
    assert [row for row in result.rows if row.op == "FLASH_ATTN_EXT"]
    assert {row.verdict for row in result.rows} == {"match"}
