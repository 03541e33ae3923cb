"""RoPE goes wrong: layout, frequencies, scaling, direction, positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from proof.unseen.attention import in_halves, in_pairs
from proof.unseen.bugs.bug import bug
from proof.unseen.engine import Engine


def _turned(change: Callable[..., Any]) -> Callable[..., Any]:
    """Rotated values by change(right rotation, x, cos, sin)."""
    return lambda e, x, cos, sin: change(lambda *given: Engine.turned(e, *given), x, cos, sin)


def _other_layout(e: Engine, x: Any, cos: Any, sin: Any) -> Any:
    return (in_halves if e.arch.positions == "pairs" else in_pairs)(x, cos, sin)


def _positions(change: Callable[[Engine, Any], Any]) -> Callable[..., Any]:
    return lambda e: change(e, e.at)


def _in_steps(change: Callable[[Engine, Any], Any]) -> Callable[..., Any]:
    return lambda e: change(e, e.at) if e.decoding else e.at


def _twice_in_steps(e: Engine, x: Any, cos: Any, sin: Any) -> Any:
    once = Engine.turned(e, x, cos, sin)
    return Engine.turned(e, once, cos, sin) if e.decoding else once


def _first_half(e: Engine) -> Any:
    """Half of the pairs turn, with frequencies of their own."""
    n = e.n_rot // 2
    return e.base() ** (-2.0 * np.arange(n // 2) / n) / e.factors()[: n // 2]


def _kept(e: Engine) -> Any:
    return Engine.kept_share(e)[: len(e.frequencies())]


def _only(side: str) -> Callable[..., Any]:
    return lambda e, x, of: Engine.rotated(e, x, of) if of == side else x


def _unused(*sides: str) -> Callable[..., Any]:
    """What is rotated is not what the scores are taken of."""

    def placed(e: Engine, x: Any, side: str) -> Any:
        turned = Engine.placed(e, x, side)
        stem, turns = f"attn_{side.lower()}_norm", e.arch.positions in ("pairs", "halves")
        raw = e.norm(x, stem) if e.has(stem) else x
        return raw if side in sides and turns else turned

    return placed


def to_halves(x: Any) -> Any:
    """Values of each head from neighbours to halves."""
    return x.reshape(*x.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(x.shape)


def to_pairs(x: Any) -> Any:
    return x.reshape(*x.shape[:-1], 2, -1).swapaxes(-1, -2).reshape(x.shape)


def _local_and_global(e: Engine) -> float:
    """The bases of local and global layers change places."""
    if not e.arch.local_base:
        return Engine.base(e)
    return float(e.file.get("rope.freq_base") if e.local else e.arch.local_base)


BUGS = (
    bug("rope: other layout", "rope-layout", turned=_other_layout),
    bug("rope: base 500000", "rope-base", base=lambda e: 500000.0),
    bug("rope: base 12345", "rope-base", base=lambda e: 12345.0),
    bug("rope: base of global layers everywhere", "rope-base", base=lambda e: e.file.get("rope.freq_base", 10000.0)),
    bug("rope: bases of local and global layers swapped", "rope-base", base=_local_and_global),
    bug("rope: scaling ignored", "rope-scaling-ignored", scaling=lambda e: 1.0, magnitude=lambda e: 1.0),
    bug("rope: scaling ignored but for its magnitude", "rope-scaling-ignored", scaling=lambda e: 1.0,
        magnitude=lambda e: 1 + 0.1 * np.log(Engine.scaling(e))),
    bug("rope: scaled positions scaled again", "rope-scaling-doubled", scaling=Engine.scaling,
        rope_positions=_positions(lambda e, p: p / e.scaling())),
    bug("rope: scaling inverted", "rope-scaling-inverted", scaling=lambda e: 1 / Engine.scaling(e),
        magnitude=lambda e: 1.0),
    bug("rope: positions divided by 8", "rope-scaling-applied", unlike=("gpt-oss", "deepseek2"),
        rope_positions=_positions(lambda e, p: p / 8)),
    bug("rope: YaRN as linear", "rope-yarn-as-linear", kept_share=lambda e: 0.0),
    bug("rope: YaRN without its magnitude", "rope-yarn-magnitude", magnitude=lambda e: 1.0),
    bug("rope: magnitude of YaRN applied", "rope-yarn-magnitude", magnitude=lambda e:
        1 + 0.1 * np.log(e.file.get("rope.scaling.factor", 1.0))),
    bug("rope: factors ignored", "rope-factors-ignored", factors=lambda e: np.ones(e.n_rot // 2)),
    bug("rope: factors inverted", "rope-factors-inverted", factors=lambda e: 1 / Engine.factors(e)),
    bug("rope: half of each head", "rope-partial", frequencies=_first_half, kept_share=_kept,
        unlike=("gpt-oss", "deepseek2", "phi3")),
    bug("rope: other direction", "rope-direction", turned=_turned(lambda right, x, cos, sin: right(x, cos, -sin))),
    bug("rope: positions from 1", "rope-position", rope_positions=_positions(lambda e, p: p + 1)),
    bug("rope: positions from -1", "rope-position", rope_positions=_positions(lambda e, p: p - 1)),
    bug("rope: steps restart", "rope-position-restarted", True,
        rope_positions=_in_steps(lambda e, p: p - e.n_prefill)),
    bug("rope: steps all at 0", "rope-position-restarted", True, rope_positions=_in_steps(lambda e, p: 0 * p)),
    bug("rope: steps stand still", "rope-position-restarted", True,
        rope_positions=_in_steps(lambda e, p: 0 * p + e.n_prefill)),
    bug("rope: steps lag by one", "rope-position-restarted", True, rope_positions=_in_steps(lambda e, p: p - 1)),
    bug("rope: none", "rope-missing", turned=_turned(lambda right, x, cos, sin: x), unlike=("gpt-oss",)),
    bug("rope: none of Q or K", "rope-missing scores-before-rope cache-before-rope", rotated=lambda e, x, of: x),
    bug("rope: none of K", "rope-missing cache-before-rope", rotated=_only("Q")),
    bug("rope: none of Q", "rope-missing scores-before-rope", rotated=_only("K")),
    bug("rope: scores of unrotated Q and K", "scores-before-rope", placed=_unused("Q", "K")),
    bug("rope: scores of unrotated Q", "scores-before-rope", placed=_unused("Q")),
    bug("rope: scores of unrotated K", "cache-before-rope", placed=_unused("K")),
    bug("rope: twice", "rope-twice",
        turned=_turned(lambda right, x, cos, sin: right(right(x, cos, sin), cos, sin))),
    bug("rope: steps twice", "rope-twice", True, turned=_twice_in_steps),
    bug("rope: permuted to halves first", "rope-permuted",
        turned=_turned(lambda right, x, cos, sin: right(to_halves(x), cos, sin))),
    bug("rope: permuted to pairs first", "rope-permuted",
        turned=_turned(lambda right, x, cos, sin: right(to_pairs(x), cos, sin))),
)  # fmt: skip
