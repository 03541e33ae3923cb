"""Which of a checkpoint's tensors makes each tensor of a file, and by which transform: one table an architecture.

Names are without layers, experts and suffix: ``attn_q`` is blk.N.attn_q, made of model.layers.N.self_attn.q_proj.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Origin:
    """``source``: {i} is the layer, {x} an expert or a head. ``make`` is a transform; ``exact``: without .weight."""

    source: str
    make: str = "identity"
    exact: bool = False


Rules = Mapping[str, tuple[Origin, ...]]  # the first whose source is in the checkpoint is taken


@dataclass(frozen=True)
class Table:
    """The rules ``outside`` the layers and those in each ``layer``."""

    outside: Rules
    layer: Rules


def _rules(make: str = "identity", prefix: str = "", **sources: str) -> dict[str, tuple[Origin, ...]]:
    """Rules of one transform: stem=source."""
    return {stem: (Origin(prefix + source, make),) for stem, source in sources.items()}


_L = "model.layers.{i}."
_OUTSIDE = _rules(**{"token_embd": "model.embed_tokens"}, output_norm="model.norm", output="lm_head")
_ATTENTION = _rules(
    prefix=_L, attn_norm="input_layernorm", attn_q="self_attn.q_proj", attn_k="self_attn.k_proj",
    attn_v="self_attn.v_proj", attn_output="self_attn.o_proj", ffn_norm="post_attention_layernorm",
)  # fmt: skip
_FFN = _rules(prefix=_L, ffn_gate="mlp.gate_proj", ffn_up="mlp.up_proj", ffn_down="mlp.down_proj")
_QK_NORM = _rules(prefix=_L, attn_q_norm="self_attn.q_norm", attn_k_norm="self_attn.k_norm")
_PERMUTED = {
    **_rules("permuted by heads", _L, attn_q="self_attn.q_proj"),
    **_rules("permuted by kv heads", _L, attn_k="self_attn.k_proj"),
}
_MIXTRAL = {
    **_rules(prefix=_L, ffn_gate_inp="block_sparse_moe.gate"),
    **_rules("stacked", f"{_L}block_sparse_moe.experts.{{x}}.", ffn_gate_exps="w1", ffn_down_exps="w2",
             ffn_up_exps="w3"),
}  # fmt: skip
_EXPERTS = {
    **_rules(prefix=_L, ffn_gate_inp="mlp.gate"),
    **{
        f"ffn_{part}_exps": (Origin(f"{_L}mlp.experts.{{x}}.{part}_proj", "stacked"), *fused)
        for part, fused in {
            "gate": (Origin(f"{_L}mlp.experts.gate_up_proj", "gate half", exact=True),),
            "up": (Origin(f"{_L}mlp.experts.gate_up_proj", "up half", exact=True),),
            "down": (Origin(f"{_L}mlp.experts.down_proj", exact=True),),
        }.items()
    },
}
_GEMMA_OUTSIDE = {**_OUTSIDE, **_rules("plus one", output_norm="model.norm")}
_GEMMA_NORMS = _rules("plus one", _L, attn_norm="input_layernorm", ffn_norm="post_attention_layernorm")
_GEMMA2_NORMS = _rules(
    "plus one", _L, attn_norm="input_layernorm", post_attention_norm="post_attention_layernorm",
    ffn_norm="pre_feedforward_layernorm", post_ffw_norm="post_feedforward_layernorm",
)  # fmt: skip
_GEMMA3_NORMS = _rules("plus one", _L, attn_q_norm="self_attn.q_norm", attn_k_norm="self_attn.k_norm")
_H, _M = "transformer.h.{i}.", "backbone.layers.{i}."

TABLES: Mapping[str, Table] = {
    "llama": Table(_OUTSIDE, {**_ATTENTION, **_PERMUTED, **_FFN, **_MIXTRAL}),
    "qwen2": Table(_OUTSIDE, {**_ATTENTION, **_FFN}),
    "qwen3": Table(_OUTSIDE, {**_ATTENTION, **_FFN, **_QK_NORM}),
    "qwen3moe": Table(_OUTSIDE, {**_ATTENTION, **_FFN, **_QK_NORM, **_EXPERTS}),
    "gemma": Table(_GEMMA_OUTSIDE, {**_ATTENTION, **_FFN, **_GEMMA_NORMS}),
    "gemma2": Table(_GEMMA_OUTSIDE, {**_ATTENTION, **_FFN, **_GEMMA2_NORMS}),
    "gemma3": Table(_GEMMA_OUTSIDE, {**_ATTENTION, **_FFN, **_GEMMA2_NORMS, **_GEMMA3_NORMS}),
    "phi3": Table(_OUTSIDE, {
        **{stem: rule for stem, rule in _ATTENTION.items() if stem not in ("attn_q", "attn_k", "attn_v")},
        **_rules(prefix=_L, attn_qkv="self_attn.qkv_proj", ffn_up="mlp.gate_up_proj", ffn_down="mlp.down_proj"),
    }),
    "stablelm": Table(_OUTSIDE, {
        **_ATTENTION, **_FFN,
        **_rules("stacked", f"{_L}self_attn.", attn_q_norm="q_layernorm.norms.{x}",
                 attn_k_norm="k_layernorm.norms.{x}"),
    }),
    "gpt2": Table(
        _rules(**{"token_embd": "transformer.wte"}, position_embd="transformer.wpe", output_norm="transformer.ln_f",
               output="lm_head"),
        {**_rules(prefix=_H, attn_norm="ln_1", ffn_norm="ln_2"),
         **_rules("transposed", _H, attn_qkv="attn.c_attn", attn_output="attn.c_proj", ffn_up="mlp.c_fc",
                  ffn_down="mlp.c_proj")},
    ),
    "mamba2": Table(
        _rules(**{"token_embd": "backbone.embeddings"}, output_norm="backbone.norm_f", output="lm_head"),
        {**_rules(prefix=_M, attn_norm="norm", ssm_in="mixer.in_proj", ssm_out="mixer.out_proj"),
         **_rules("kernel without its middle axis", _M, ssm_conv1d="mixer.conv1d"),
         **_rules("by groups", _M, ssm_norm="mixer.norm"),
         "ssm_a": (Origin(f"{_M}mixer.A_log", "-exp", exact=True),),
         "ssm_d": (Origin(f"{_M}mixer.D", "as a column", exact=True),),
         "ssm_dt": (Origin(f"{_M}mixer.dt_bias", exact=True), Origin(f"{_M}mixer.dt_proj.bias", exact=True))},
    ),
}  # fmt: skip

# Checkpoints' tensors that no file has: tables that are computed, and masks.
IGNORED = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")
