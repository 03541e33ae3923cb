"""Ten bugs that people had, each injected into a copy of the engine; and the taps where it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from llamaref import Engine, ops
from llamaref.config import Rope


@dataclass(frozen=True)
class Bug:
    """``words`` are the taps the bug falsifies in every layer, first the one that must be named."""

    name: str
    arch: str
    words: tuple[str, ...]
    build: Callable[[Path], Engine]


def with_maths(**changed: Any) -> Callable[[Path], Engine]:
    """An engine whose maths differs in the functions given."""
    return lambda path: Engine(path, maths=maths_with(changed))


def maths_with(changed: Mapping[str, Any]) -> SimpleNamespace:
    """The maths with other functions; a softmax is so for long prompts, too."""
    of_many = {"causal_softmax_of_many": changed["causal_softmax"]} if "causal_softmax" in changed else {}
    return SimpleNamespace(**{**vars(ops), **of_many, **changed})


def _epsilon(x: Any, weight: Any, eps: float) -> Any:
    return ops.rms_norm(x, weight, eps * 10)


def _base(rope: Rope, positions: Any, factors: Any = None) -> Any:
    return ops.rope_angles(Rope(rope.n_rot, rope.base * 50), positions, factors)


def tiled(q: Any, k: Any) -> Any:
    """Query head h reads KV head h % n_kv instead of h // group."""
    group = q.shape[2] // k.shape[2]
    return ops.attention_scores(q, np.tile(k, (1, 1, group, 1)))


def shifted_mask(scores: Any, scale: float, queries: Any, keys: Any) -> Any:
    return ops.causal_softmax(scores, scale, queries + 1, keys)


class _NoBias(Engine):
    def linear(self, x: Any, name: str, tap: Any) -> Any:
        y = super().linear(x, name, tap)
        return y - self.w.vector(f"{name}.bias") if name.endswith("attn_v") else y


class NoQkNorm(Engine):
    def norm(self, x: Any, name: str) -> Any:
        return x if name.endswith(("attn_q_norm", "attn_k_norm")) else super().norm(x, name)


class NoFinalNorm(Engine):
    def norm(self, x: Any, name: str) -> Any:
        return x if name == "output_norm" else super().norm(x, name)


class GateUpSwapped(Engine):
    SWAP: ClassVar = {"ffn_gate": "ffn_up", "ffn_up": "ffn_gate"}

    def linear(self, x: Any, name: str, tap: Any) -> Any:
        prefix, _, stem = name.rpartition(".")
        return super().linear(x, f"{prefix}.{self.SWAP.get(stem, stem)}" if prefix else name, tap)


ROPE = ("Qcur_rope", "Kcur_rope")
NORMS = ("attn_norm", "ffn_norm", "result_norm")

BUGS = (
    Bug("rope layout", "llama", ROPE, with_maths(rope_pairs=ops.rope_halves)),
    Bug("rope base", "llama", ROPE, with_maths(rope_angles=_base)),
    Bug("epsilon x10", "llama", NORMS, with_maths(rms_norm=_epsilon)),
    Bug("missing bias", "qwen2", ("Vcur_proj",), _NoBias),
    Bug("missing qk-norm", "qwen3", ("Qcur_normed", "Kcur_normed"), NoQkNorm),
    Bug("gqa tiled", "llama", ("kq",), with_maths(attention_scores=tiled)),
    Bug("gate and up swapped", "llama", ("ffn_gate", "ffn_up"), GateUpSwapped),
    Bug("residual dropped", "llama", ("ffn_inp", "l_out"), with_maths(add=lambda branch, residual: branch)),
    Bug("mask off by one", "llama", ("kq_soft_max",), with_maths(causal_softmax=shifted_mask)),
    Bug("final norm skipped", "llama", ("result_norm",), NoFinalNorm),
)
