"""What an architecture is besides the maths of its layers: the data that the engine asks a model's file for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Windows:
    """Layers that see the last tokens alone, as far as the metadata does not say it.

    ``length`` in tokens (0: no layer does, None: the metadata must say); of every ``period`` layers the last sees all.
    """

    length: int | None
    period: int


@dataclass(frozen=True)
class Traits:
    """What all models of an architecture have in common.

    ``layers`` are words for what its layers have, which taps depend on (llamadiff/trace/taps.py); ``keys`` the
    metadata that its ``configure`` reads, or that changes nothing, besides everybody's (metadata.py).
    """

    layers: str
    norm: Literal["RMS_NORM", "NORM"] = "RMS_NORM"  # ggml's op
    qk_norm: Literal["head", "heads", "row"] = "head"  # its weight: one for all heads, one a head, or for a whole row
    rope_pairs: bool = False  # (2i, 2i+1), for which GGUF files permute the rows of Q and K; else halves (i, i + n/2)
    long_rope: bool = False  # whether rope_factors_long and rope_factors_short are read
    learned_positions: bool = False  # whether position_embd is added to the embedding
    ffn_scales: bool = False  # whether llama.cpp's graph multiplies by ffn_*.scale where a file has it
    windows: Windows | None = None
    keys: str = ""

    def has(self, word: str) -> bool:
        """Whether its layers have something."""
        return word in self.layers.split()
