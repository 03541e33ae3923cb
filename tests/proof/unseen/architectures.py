"""What sets each architecture apart. The rest is in its file: which tensors it has, and the metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from models.options import OPTIONS
from models.small_others import bloom, deepseek2, falcon, gpt_oss, granitehybrid, lfm2


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


_LFM2 = {
    "conv_in": "model.layers.{}.conv.in_proj", "conv": "model.layers.{}.conv.conv",
    "conv_out": "model.layers.{}.conv.out_proj",
}  # fmt: skip

ARCHITECTURES = {
    "gemma3": Architecture(activation="gelu", window=6, local_base=10000.0, queries_scaled=True,
                           embedding_of_root=True),
    "gpt2": Architecture("learned", layer_norm=True, activation="gelu"),
    "bloom": Architecture("alibi", layer_norm=True, activation="gelu"),
    "falcon": Architecture(layer_norm=True, activation="gelu", parallel=True, norms=("attn_norm_2", "attn_norm")),
    "phi3": Architecture(queries_scaled=True),
    "gpt-oss": Architecture(activation="oai", window=2, router="chosen", norms=("attn_norm", "post_attention_norm"),
                            names={"ffn_norm": "attn_post_norm", "ffn_moe_swiglu": "ffn_moe_swiglu_oai"}),
    "qwen3moe": Architecture(),
    "deepseek2": Architecture("pairs", router="sigmoid"),
    "mamba2": Architecture(""),
    "lfm2": Architecture(names=_LFM2),
    "granitehybrid": Architecture(""),
}  # fmt: skip

_YARN: dict[str, Any] = {
    "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64,
}  # fmt: skip
# how small models of them are written (small.write_model)
MODELS: Mapping[str, dict[str, Any]] = {
    **{name: OPTIONS[name] for name in ("gemma3", "gpt2", "phi3", "qwen3moe", "mamba2")},
    "bloom": bloom(), "falcon": falcon(), "gpt-oss": gpt_oss(**_YARN), "deepseek2": deepseek2(absorbed=True),
    "lfm2": lfm2(), "granitehybrid": granitehybrid(),
}  # fmt: skip
