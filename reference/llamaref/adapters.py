"""LoRA adapters in GGUF files: matrices A and B of low rank, of which s B A is added to a matrix W of a model.

Hu et al. 2021, arXiv:2106.09685; llama.cpp, llama_adapter_lora_init_impl (src/llama-adapter.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llamaref.weights import Weights

ALPHA = "adapter.lora.alpha"
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
