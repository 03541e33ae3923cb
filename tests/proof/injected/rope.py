"""RoPE goes wrong: layout, frequencies, scaling, direction, positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from faulty import with_maths
from llamaref import ops
from llamaref.config import Rope

from proof.injected.base import (
    DECODE,
    DENSE,
    PREFILL,
    Build,
    Injection,
    altered,
    rotating,
    to_halves,
    to_pairs,
    with_rope,
)

WORDS = ("Qcur_rope", "Kcur_rope")
SCALED = ("llama-linear", "llama-yarn")


def _theta(change: Callable[..., Any], magnitude: Callable[[Rope], float] = ops.rope_magnitude) -> Build:
    """cos and sin of the angles change(rope, positions, factors)."""

    def angles(rope: Rope, positions: Any, factors: Any = None) -> Any:
        theta = change(rope, positions, factors)
        return np.cos(theta) * magnitude(rope), np.sin(theta) * magnitude(rope)

    return with_maths(rope_angles=angles)


def _positions(change: Callable[[Any], Any]) -> Build:
    return with_maths(
        rope_angles=lambda rope, positions, factors=None: ops.rope_angles(rope, change(positions), factors)
    )


def _in_decode(change: Callable[[Any], Any]) -> Build:
    return _positions(lambda p: np.where(np.arange(len(p)) < PREFILL, p, change(p)))


def _frequencies(rope: Rope) -> Any:
    return rope.base ** (-2.0 * np.arange(rope.n_rot // 2) / rope.n_rot)


def _yarn_inverted(rope: Rope, positions: Any, factors: Any) -> Any:
    """YaRN that multiplies what it should divide."""
    keep, theta = ops.yarn_keep(rope), positions[:, None] * _frequencies(rope)
    return theta * rope.factor * (1 - keep) + theta * keep


def _part_of_the_frequencies(rope: Rope, positions: Any, factors: Any) -> Any:
    """The first half of the pairs, with the frequencies they have when all are rotated."""
    return (positions[:, None] * _frequencies(rope))[:, : rope.n_rot // 4]


def _in_steps(x: Any, other: Any) -> Any:
    """What decode steps have instead."""
    return np.concatenate([x[:, :PREFILL], other[:, PREFILL:]], axis=1)


def _only_q(right: Any, x: Any, cos: Any, sin: Any) -> Any:
    return right(x, cos, sin) if x.shape[2] == 4 else x


INJECTIONS = (
    Injection("rope: other layout", "rope-layout", WORDS,
              with_maths(rope_pairs=ops.rope_halves, rope_halves=ops.rope_pairs), (*DENSE, "stablelm", "moe")),
    Injection("rope: other layout with YaRN", "rope-layout", WORDS,
              with_maths(rope_pairs=ops.rope_halves, rope_halves=ops.rope_pairs), SCALED),
    Injection("rope: base 500000", "rope-base", WORDS,
              with_rope(lambda rope: replace(rope, base=500000.0)), (*DENSE, "stablelm")),
    Injection("rope: base 1000000", "rope-base", WORDS, with_rope(lambda rope: replace(rope, base=1e6))),
    Injection("rope: file's base ignored", "rope-base", WORDS,
              with_rope(lambda rope: replace(rope, base=10000.0)), ("llama-base",)),
    Injection("rope: base 12345", "rope-base", WORDS, with_rope(lambda rope: replace(rope, base=12345.0))),
    Injection("rope: scaling ignored", "rope-scaling-ignored", WORDS,
              with_rope(lambda rope: Rope(rope.n_rot, rope.base)), SCALED),
    Injection("rope: linear scaling twice", "rope-scaling-doubled", WORDS,
              with_rope(lambda rope: replace(rope, factor=rope.factor**2)), ("llama-linear",)),
    Injection("rope: YaRN of scaled positions", "rope-scaling-doubled", WORDS,
              _theta(lambda rope, p, factors: ops.rope_theta(rope, p / rope.factor)), ("llama-yarn",)),
    Injection("rope: YaRN of the factor's square", "rope-scaling-doubled", WORDS,
              with_rope(lambda rope: replace(rope, factor=rope.factor**2)), ("llama-yarn",)),
    Injection("rope: linear scaling inverted", "rope-scaling-inverted", WORDS,
              with_rope(lambda rope: replace(rope, factor=1 / rope.factor)), ("llama-linear",)),
    Injection("rope: YaRN inverted", "rope-scaling-inverted", WORDS, _theta(_yarn_inverted), ("llama-yarn",)),
    Injection("rope: YaRN of the factor's inverse", "rope-scaling-inverted", WORDS,
              with_rope(lambda rope: replace(rope, factor=1 / rope.factor)), ("llama-yarn",)),
    Injection("rope: positions divided by 8", "rope-scaling-applied", WORDS,
              with_rope(lambda rope: replace(rope, factor=8.0)), (*DENSE, "llama-linear")),
    Injection("rope: positions divided by 2", "rope-scaling-applied", WORDS,
              with_rope(lambda rope: replace(rope, factor=2.0))),
    Injection("rope: YaRN as linear", "rope-yarn-as-linear", WORDS,
              with_rope(lambda rope: Rope(rope.n_rot, rope.base, rope.factor)), ("llama-yarn",)),
    Injection("rope: YaRN's angles as linear", "rope-yarn-as-linear", WORDS,
              _theta(lambda rope, p, factors: ops.rope_theta(Rope(rope.n_rot, rope.base, rope.factor), p)),
              ("llama-yarn",)),
    Injection("rope: YaRN without temperature", "rope-yarn-magnitude", WORDS,
              _theta(ops.rope_theta, lambda rope: 1.0), ("llama-yarn",)),
    Injection("rope: factors ignored", "rope-factors-ignored", WORDS,
              _theta(lambda rope, p, factors: ops.rope_theta(rope, p)), ("llama-factors",)),
    Injection("rope: factors inverted", "rope-factors-inverted", WORDS,
              _theta(lambda rope, p, factors: ops.rope_theta(rope, p, 1 / factors)), ("llama-factors",)),
    Injection("rope: whole heads", "rope-partial-ignored", WORDS,
              with_rope(lambda rope: replace(rope, n_rot=64)), ("stablelm",)),
    Injection("rope: half of each head", "rope-partial", WORDS,
              with_rope(lambda rope: replace(rope, n_rot=rope.n_rot // 2)), (*DENSE, "stablelm")),
    Injection("rope: half of the pairs", "rope-partial", WORDS, _theta(_part_of_the_frequencies), DENSE),
    Injection("rope: a quarter of each head", "rope-partial", WORDS,
              with_rope(lambda rope: replace(rope, n_rot=rope.n_rot // 4))),
    Injection("rope: other direction", "rope-direction", WORDS,
              rotating(lambda right, x, cos, sin: right(x, cos, -sin)), (*DENSE, "stablelm")),
    Injection("rope: positions from 1", "rope-position", WORDS, _positions(lambda p: p + 1), (*DENSE, "stablelm")),
    Injection("rope: positions from -1", "rope-position", WORDS, _positions(lambda p: p - 1), DENSE),
    Injection("rope: positions from 2", "rope-position", WORDS, _positions(lambda p: p + 2)),
    Injection("rope: steps restart", "rope-position-restarted", WORDS,
              _in_decode(lambda p: p - PREFILL), (*DENSE, "stablelm"), decode=DECODE),
    Injection("rope: steps all at 0", "rope-position-restarted", WORDS, _in_decode(np.zeros_like), decode=DECODE),
    Injection("rope: steps stand still", "rope-position-restarted", WORDS,
              _in_decode(lambda p: np.full_like(p, PREFILL)), DENSE, decode=DECODE),
    Injection("rope: steps stand still at the prompt's end", "rope-position-restarted", WORDS,
              _in_decode(lambda p: np.full_like(p, PREFILL - 1)), decode=DECODE),
    Injection("rope: steps lag by one", "rope-position-restarted", WORDS,
              _in_decode(lambda p: p - 1), DENSE, decode=DECODE),
    Injection("rope: none", "rope-missing", WORDS,
              rotating(lambda right, x, cos, sin: x), (*DENSE, "stablelm", "moe", *SCALED, "llama-factors")),
    Injection("rope: none of K", "rope-missing", WORDS[1:], rotating(_only_q), ("llama", "qwen3")),
    Injection("rope: twice", "rope-twice", WORDS,
              rotating(lambda right, x, cos, sin: right(right(x, cos, sin), cos, sin)), (*DENSE, "stablelm")),
    Injection("rope: steps twice", "rope-twice", WORDS,
              rotating(lambda right, x, cos, sin: _in_steps(right(x, cos, sin), right(right(x, cos, sin), cos, sin))),
              decode=DECODE),
    Injection("rope: permuted to halves first", "rope-permuted", WORDS,
              rotating(lambda right, x, cos, sin: right(to_halves(x), cos, sin)), DENSE),
    Injection("rope: permuted to pairs first", "rope-permuted", WORDS,
              rotating(lambda right, x, cos, sin: right(to_pairs(x), cos, sin)), DENSE),
    Injection("rope: K permuted to halves first", "rope-permuted", WORDS[1:],
              rotating(lambda right, x, cos, sin: right(x if x.shape[2] == 4 else to_halves(x), cos, sin))),
    Injection("rope: heads in the order of halves", "rope-other-order", WORDS,
              altered(Qcur_rope=lambda x, run: to_halves(x), Kcur_rope=lambda x, run: to_halves(x)),
              ("llama", "moe"), says="has the right values in the other order within each head"),
)  # fmt: skip
