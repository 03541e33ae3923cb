"""What sets each architecture apart. The rest is in its file: which tensors it has, and the metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Architecture:
    """One of a family of decoders.

    ``positions``: RoPE of "pairs" (2i, 2i+1) or "halves" (i, i + n/2), "alibi", "learned", or nothing. ``window``: a
    layer is local, unless its number plus one is a multiple of this. ``queries_scaled``: the attention scale is in Q,
    after RoPE. ``router``: "softmax" or "sigmoid" of all scores, or "chosen": a softmax of the chosen ones' scores.
    ``norms``: the stems of the norms before attention and before the FFN. ``names``: taps with names of their own.
    """

    positions: str = "halves"
    layer_norm: bool = False
    activation: str = "silu"
    window: int = 0
    local_base: float = 0.0
    queries_scaled: bool = False
    embedding_of_root: bool = False
    parallel: bool = False
    router: str = "softmax"
    norms: tuple[str, str] = ("attn_norm", "ffn_norm")
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def rotates(self) -> bool:
        return self.positions in ("pairs", "halves")


_LFM2 = {
    "conv_in": "model.layers.{}.conv.in_proj", "conv": "model.layers.{}.conv.conv",
    "conv_out": "model.layers.{}.conv.out_proj",
}  # fmt: skip

ARCHITECTURES = {
    "llama": Architecture("pairs"),
    "qwen2": Architecture(),
    "qwen3": Architecture(),
    "qwen3moe": Architecture(),
    "stablelm": Architecture(layer_norm=True),
    "gemma3": Architecture(activation="gelu", window=6, local_base=10000.0, queries_scaled=True,
                           embedding_of_root=True),
    "gpt2": Architecture("learned", layer_norm=True, activation="gelu"),
    "bloom": Architecture("alibi", layer_norm=True, activation="gelu"),
    "falcon": Architecture(layer_norm=True, activation="gelu", parallel=True, norms=("attn_norm_2", "attn_norm")),
    "phi3": Architecture(queries_scaled=True),
    "gpt-oss": Architecture(activation="oai", window=2, router="chosen", norms=("attn_norm", "post_attention_norm"),
                            names={"ffn_norm": "attn_post_norm", "ffn_moe_swiglu": "ffn_moe_swiglu_oai"}),
    "deepseek2": Architecture("pairs", router="sigmoid"),
    "mamba2": Architecture(""),
    "lfm2": Architecture(names=_LFM2),
    "granitehybrid": Architecture(""),
}  # fmt: skip
