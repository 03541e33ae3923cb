"""RoPE goes wrong: layout, frequencies, scaling, direction, positions."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from proof.injected.base import DECODE, DENSE, OWN_PAIRS, SAME, at, bug, elsewhere, to_halves, to_pairs
from proof.strangers.engine import Array, Edit, Engine

WORDS = ("Qcur_rope", "Kcur_rope")
SCALED = ("llama-linear", "llama-yarn")


def pairs_of(part: float = 1, whole: bool = False) -> dict[str, Edit]:
    """Frequencies of other pairs: a part of each head's, or all of them."""

    def frequencies(e: Engine, right: Edit) -> Array:
        n = e.h.dim if whole else int(e.h.n_rot * part)
        return e.base() ** (-2.0 * np.arange(n // 2) / n)

    return {"frequencies": frequencies}


def plain_theta(e: Engine, positions: Array, stretch: float = 1.0) -> Array:
    return positions[:, None] * e.frequencies() / stretch


def at_positions(change: Callable[[Array], Array]) -> dict[str, Edit]:
    return {"theta": lambda e, right, p: right(change(p))}


def in_steps(change: Callable[[Array, int], Array]) -> dict[str, Edit]:
    """Other positions in decode steps."""
    return {"theta": lambda e, right, p: right(np.where(p < e.n_prefill, p, change(p, e.n_prefill)))}


def stretched_by(change: Callable[[float], float]) -> dict[str, Edit]:
    return {"stretch": lambda e, right: change(right())}


def yarn_inverted(e: Engine, right: Edit, positions: Array) -> Array:
    keep, theta = e.yarn_keep(), plain_theta(e, positions)
    return theta * e.h.factor * (1 - keep) + theta * keep


def yarn_unrounded(e: Engine, right: Edit, positions: Array) -> Array:
    """Pair by pair, by how often each turns over the original context."""
    plain, turns = plain_theta(e, positions), e.h.original / (2 * np.pi / e.frequencies())
    keep = np.clip(np.log(turns) / np.log(32), 0, 1)  # 32 turns and more stay, 1 and less are divided
    return plain * keep + plain / e.h.factor * (1 - keep)


def yarn_of_a_context(length: int) -> dict[str, Edit]:
    """Blended over whole pairs, as of another original context."""

    def theta(e: Engine, right: Edit, positions: Array) -> Array:
        plain, n = plain_theta(e, positions), e.h.n_rot
        first, last = (n * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(e.base())) for turns in (32, 1))
        first, last = max(0, math.floor(first)), min(n - 1, math.ceil(last))
        keep = 1 - np.clip((np.arange(n // 2) - first) / (last - first), 0, 1)
        return plain * keep + plain / e.h.factor * (1 - keep)

    return {"theta": theta}


def turning(change: Callable[[Engine, Edit, Array, str], Array]) -> dict[str, Edit]:
    """Heads of one side, Q or K, rotated in another way."""
    return {"rotated": change}


def bases_swapped(e: Engine, right: Edit) -> float:
    """Those of local and global layers."""
    local = e.h.arch.local_base
    return float(right() if not local else e.h.base if e.local else local)


AS_LINEAR: dict[str, Edit] = {"theta": lambda e, right, p: plain_theta(e, p, e.h.factor)}
NO_TEMPERATURE: dict[str, Edit] = {"magnitude": lambda e, right: 1.0}
TEMPERATURE: dict[str, Edit] = {"magnitude": lambda e, right: 1 + 0.1 * math.log(e.h.factor)}
OTHER_LAYOUT = turning(lambda e, right, x, side: e.turned(x, *e.angles(e.positions), not e.in_pairs))
INJECTIONS = (
    bug("rope: other layout", "rope-layout", WORDS, OTHER_LAYOUT, models=(*DENSE, "stablelm", "moe"),
        needs=(OWN_PAIRS,), others=SAME),
    bug("rope: other layout with YaRN", "rope-layout", WORDS, OTHER_LAYOUT, models=SCALED, needs=(OWN_PAIRS,)),
    bug("rope: base 500000", "rope-base", WORDS, {"base": lambda e, right: 500000.0}, models=(*DENSE, "stablelm"),
        others=SAME),
    bug("rope: base 1000000", "rope-base", WORDS, {"base": lambda e, right: 1e6}),
    bug("rope: file's base ignored", "rope-base", WORDS, {"base": lambda e, right: 10000.0}, models=("llama-base",)),
    bug("rope: base 12345", "rope-base", WORDS, {"base": lambda e, right: 12345.0}, others=SAME),
    bug("rope: scaling ignored", "rope-scaling-ignored", WORDS,
        {"theta": lambda e, right, p: plain_theta(e, p), **NO_TEMPERATURE}, models=SCALED, others=SAME),
    bug("rope: linear scaling twice", "rope-scaling-doubled", WORDS, stretched_by(lambda factor: factor**2),
        models=("llama-linear",)),
    bug("rope: YaRN of scaled positions", "rope-scaling-doubled", WORDS,
        {"theta": lambda e, right, p: right(p / e.h.factor)}, models=("llama-yarn",), others=SAME),
    bug("rope: YaRN of the factor's square", "rope-scaling-doubled", WORDS, stretched_by(lambda factor: factor**2),
        models=("llama-yarn",)),
    bug("rope: linear scaling inverted", "rope-scaling-inverted", WORDS, stretched_by(lambda factor: 1 / factor),
        models=("llama-linear",)),
    bug("rope: YaRN inverted", "rope-scaling-inverted", WORDS, {"theta": yarn_inverted}, models=("llama-yarn",)),
    bug("rope: YaRN of the factor's inverse", "rope-scaling-inverted", WORDS, stretched_by(lambda factor: 1 / factor),
        models=("llama-yarn",), others=SAME),
    bug("rope: positions divided by 8", "rope-scaling-applied", WORDS,
        {"theta": lambda e, right, p: plain_theta(e, p, 8.0)}, models=(*DENSE, "llama-linear"), others=SAME,
        unlike=("gpt-oss", "deepseek2")),
    bug("rope: positions divided by 2", "rope-scaling-applied", WORDS,
        {"theta": lambda e, right, p: plain_theta(e, p, 2.0)}),
    bug("rope: YaRN as linear", "rope-yarn-as-linear", WORDS, {**AS_LINEAR, **NO_TEMPERATURE}, models=("llama-yarn",)),
    bug("rope: YaRN's angles as linear", "rope-yarn-as-linear", WORDS, AS_LINEAR, models=("llama-yarn",), others=SAME),
    bug("rope: YaRN without temperature", "rope-yarn-magnitude", WORDS, NO_TEMPERATURE, models=("llama-yarn",),
        others=SAME),
    bug("rope: YaRN's range not rounded", "rope-yarn-unrounded", WORDS, {"theta": yarn_unrounded},
        models=("llama-yarn",), others=SAME),
    bug("rope: YaRN of another original context", "rope-yarn-original", WORDS, yarn_of_a_context(8192),
        models=("llama-yarn",)),
    bug("rope: factors ignored", "rope-factors-ignored", WORDS, {"factors": lambda e, right: np.ones_like(right())},
        models=("llama-factors",), others=SAME),
    bug("rope: factors inverted", "rope-factors-inverted", WORDS, {"factors": lambda e, right: 1 / right()},
        models=("llama-factors",), others=SAME),
    bug("rope: whole heads", "rope-partial-ignored", WORDS, pairs_of(whole=True), models=("stablelm",)),
    bug("rope: half of each head", "rope-partial", WORDS, pairs_of(part=0.5), models=(*DENSE, "stablelm"), others=SAME,
        unlike=("gpt-oss", "deepseek2", "phi3")),
    bug("rope: half of the pairs", "rope-partial", WORDS, {"frequencies": lambda e, right: right()[: e.h.n_rot // 4]},
        models=DENSE),
    bug("rope: a quarter of each head", "rope-partial", WORDS, pairs_of(part=0.25)),
    bug("rope: other direction", "rope-direction", WORDS, {"angles": lambda e, right, p: (right(p)[0], -right(p)[1])},
        models=(*DENSE, "stablelm"), others=SAME),
    bug("rope: positions from 1", "rope-position", WORDS, at_positions(lambda p: p + 1), models=(*DENSE, "stablelm"),
        others=SAME),
    bug("rope: positions from -1", "rope-position", WORDS, at_positions(lambda p: p - 1), models=DENSE, others=SAME),
    bug("rope: positions from 2", "rope-position", WORDS, at_positions(lambda p: p + 2)),
    bug("rope: steps restart", "rope-position-restarted", WORDS, in_steps(lambda p, n: p - n),
        models=(*DENSE, "stablelm"), decode=DECODE, others=SAME),
    bug("rope: steps all at 0", "rope-position-restarted", WORDS, in_steps(lambda p, n: p * 0), decode=DECODE,
        others=SAME),
    bug("rope: steps stand still", "rope-position-restarted", WORDS, in_steps(lambda p, n: p * 0 + n), models=DENSE,
        decode=DECODE, others=SAME),
    bug("rope: steps stand still at the prompt's end", "rope-position-restarted", WORDS,
        in_steps(lambda p, n: p * 0 + n - 1), decode=DECODE),
    bug("rope: steps lag by one", "rope-position-restarted", WORDS, in_steps(lambda p, n: p - 1), models=DENSE,
        decode=DECODE, others=SAME),
    bug("rope: none", "rope-missing", WORDS, turning(lambda e, right, x, side: x),
        models=(*DENSE, "stablelm", "moe", *SCALED, "llama-factors"), others=SAME, unlike=("gpt-oss",)),
    bug("rope: none of K", "rope-missing", WORDS[1:],
        turning(lambda e, right, x, side: x if side == "K" else right(x, side)), models=("llama", "qwen3"),
        others="rope-missing cache-before-rope"),
    bug("rope: twice", "rope-twice", WORDS, turning(lambda e, right, x, side: right(right(x, side), side)),
        models=(*DENSE, "stablelm"), others=SAME),
    bug("rope: permuted to halves first", "rope-permuted", WORDS,
        turning(lambda e, right, x, side: right(to_halves(x), side)), models=DENSE, needs=(OWN_PAIRS,), others=SAME),
    bug("rope: permuted to pairs first", "rope-permuted", WORDS,
        turning(lambda e, right, x, side: right(to_pairs(x), side)), models=DENSE, needs=(OWN_PAIRS,), others=SAME),
    bug("rope: K permuted to halves first", "rope-permuted", WORDS[1:],
        turning(lambda e, right, x, side: right(to_halves(x) if side == "K" else x, side)), needs=(OWN_PAIRS,)),
    bug("rope: heads in the order of halves", "rope-other-order", WORDS, models=("llama", "moe"),
        says="has the right values in the other order within each head", **at(WORDS, lambda e, x: to_halves(x))),
    elsewhere("rope: base of global layers everywhere", "rope-base", {"base": lambda e, right: float(e.h.base)}),
    elsewhere("rope: bases of local and global layers swapped", "rope-base", {"base": bases_swapped}),
    elsewhere("rope: scaling ignored but for its magnitude", "rope-scaling-ignored",
              {"theta": lambda e, right, p: plain_theta(e, p), **TEMPERATURE}),
    elsewhere("rope: magnitude of YaRN applied", "rope-yarn-magnitude", TEMPERATURE),
    elsewhere("rope: none of Q or K", "rope-missing scores-before-rope cache-before-rope",
              turning(lambda e, right, x, side: x)),
    elsewhere("rope: none of Q", "rope-missing scores-before-rope",
              turning(lambda e, right, x, side: x if side == "Q" else right(x, side))),
)  # fmt: skip
