"""LoRA adapters in GGUF files: matrices A and B of low rank, of which s B A is added to a matrix W of a model.

Hu et al. 2021, arXiv:2106.09685; llama.cpp, llama_adapter_lora_init_impl (src/llama-adapter.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llamaref.errors import ModelError
from llamaref.weights import Weights

ARCHITECTURE, KIND, ALPHA = "general.architecture", "adapter.type", "adapter.lora.alpha"
A, B = ".lora_a", ".lora_b"
EMBEDDING = "token_embd.weight"  # whose A and B are the other way round, since its rows are looked up


@dataclass(frozen=True)
class LowRank:
    """The names of A [rank, in] and B [out, rank] in the adapter's file; of the embedding A is [vocab, rank] and B
    [embd, rank]. One that the file lacks is empty.
    """

    a: str = ""
    b: str = ""

    @property
    def is_whole(self) -> bool:
        return bool(self.a and self.b)


def pairs_of(adapter: Weights) -> Mapping[str, LowRank]:
    """The tensor of the model -> what the adapter has for it."""
    names = [name.removesuffix(A) for name in adapter if name.endswith(A)]
    names += [name.removesuffix(B) for name in adapter if name.endswith(B)]
    return {
        name: LowRank(*(name + end if name + end in adapter else "" for end in (A, B))) for name in dict.fromkeys(names)
    }


def rank_of(adapter: Weights, pair: LowRank) -> int:
    """How many values lie between A and B: B's rows have so many."""
    return adapter.shape(pair.b)[-1]


def scale_of(fields: Mapping[str, Any], rank: int, scale: float = 1.0) -> float:
    """s, where the adapter is applied with a ``scale``: scale * alpha / rank; the scale where alpha is 0 or missing."""
    alpha = fields.get(ALPHA, 0.0)
    return scale * alpha / rank if isinstance(alpha, (int, float)) and alpha else scale


@dataclass(frozen=True)
class Adapter:
    """An adapter that is applied with a ``scale``: what it adds to products with a model's matrices."""

    weights: Weights
    pairs: Mapping[str, LowRank]
    scale: float

    def factor(self, name: str) -> np.float32:
        """s of a matrix that it has a pair for."""
        return np.float32(scale_of(self.weights.fields, rank_of(self.weights, self.pairs[name]), self.scale))


def adapted(weights: Weights, path: str | Path, scale: float = 1.0) -> Weights:
    """A model's weights, whose products have those of an adapter added.

    Raises ModelError for a file that is no adapter, or of another model; so does llama.cpp (llama-adapter.cpp).
    """
    low = Weights(path, weights.dtype)
    kind, pairs = low.fields.get(KIND), pairs_of(low)
    if kind != "lora" or not pairs:
        raise ModelError(f"{path}: is no LoRA adapter (adapter.type {kind!r}, {len(pairs)} pairs of lora_a and lora_b)")
    whose, of = (each.fields.get(ARCHITECTURE) for each in (low, weights))
    if whose != of:
        raise ModelError(f"{path}: is an adapter of {whose}, the model is {of}")
    for name, pair in pairs.items():
        says = misfit(low, pair, name, weights)
        if says:
            raise ModelError(f"{path}: {name} {says}; llamadiff weights ADAPTER MODEL lists all that does not fit")
    weights.adapter = Adapter(low, pairs, scale)
    return weights


def misfit(low: Weights, pair: LowRank, name: str, weights: Weights) -> str:
    """Why what is there for a tensor does not fit the model; empty where it does."""
    if name not in weights:
        return "is in no tensor of the model: llama.cpp refuses the adapter"
    rows, width = (1, *weights.shape(name))[-2:]
    sides = {pair.a: (rows, 0), pair.b: (width, 0)} if name == EMBEDDING else {pair.a: (width, 1), pair.b: (rows, 0)}
    for half, (size, axis) in sides.items():
        if half and (len(low.shape(half)) < 2 or low.shape(half)[-2:][axis] != size):
            return f"{half.rpartition('.')[2]} is {list(low.shape(half))}, the model's matrix is {[rows, width]}"
    return fault(low, pair, name)


def fault(low: Weights, pair: LowRank, name: str) -> str:
    """What is wrong with a pair by itself; empty where nothing is."""
    if not pair.is_whole:
        return f"has no {B if pair.a else A}: llama.cpp refuses the adapter"
    rank = low.shape(pair.a)[-1 if name == EMBEDDING else -2]
    if rank != rank_of(low, pair):
        return f"lora_a has {rank} rows, lora_b rows of {rank_of(low, pair)}: both are the rank"
    return ""
