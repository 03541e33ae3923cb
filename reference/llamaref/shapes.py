"""What shape every weight must have, from the configuration: a file that says otherwise cannot be run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from llamaref.errors import ModelError

if TYPE_CHECKING:
    from llamaref.config import Config
    from llamaref.weights import Weights

_NAME = re.compile(r"(?:blk\.([0-9]+)\.)?(\w+)\.(weight|bias|scale)")


def check_layers(w: Weights) -> None:
    """Raise ModelError for a number of layers that the file does not have, before anything is made for each of them."""
    stated = w.fields.get(f"{w.fields.get('general.architecture')}.block_count")
    layers = {int(match[1]) for name in w if (match := _NAME.fullmatch(name)) and match[1] is not None}
    if isinstance(stated, int) and (layers != set(range(len(layers))) or len(layers) != stated):
        raise ModelError(f"block_count = {stated}: the file has tensors of {len(layers)} layers")


def check_shapes(c: Config, w: Weights) -> None:
    """Raise ModelError for the shape of a tensor that is not what the metadata implies."""
    for name, says in misfits(c, w):
        raise ModelError(f"{name}: {says}")


def misfits(c: Config, w: Weights) -> Iterator[tuple[str, str]]:
    """The tensors whose shape is not what the metadata implies, and how it is."""
    matches = {name: match for name in w if (match := _NAME.fullmatch(name))}
    for name, match in matches.items():
        found, wanted = w.shape(name), _shape(c, w, match)
        if wanted is not None and _without_ones(found) != _without_ones(wanted):
            rows = f"rows of {found[-1] if found else 1} weights, shape {list(found)}"
            yield name, f"{rows}; the metadata implies {list(wanted)}"


def _shape(c: Config, w: Weights, match: re.Match[str]) -> tuple[int, ...] | None:
    """The shape of one tensor; None if no product or norm of the engine reads it."""
    layer, stem, part = match.groups()
    prefix = "" if layer is None else f"blk.{layer}."
    table = _outside(c, w) if layer is None else {**_attention(c), **_latent(c), **_ffn(c, w, prefix), **_scan(c)}
    weight = table.get(stem)
    if weight is None or part == "weight":
        return weight
    if len(weight) == 1:  # a norm: LayerNorm's has a bias
        return weight if part == "bias" else None
    if part == "scale":
        return weight[:-2] or (1,)
    return weight[:-1]


def _outside(c: Config, w: Weights) -> Mapping[str, tuple[int, ...]]:
    vocab = w.shape("token_embd.weight")[:1]  # what the file has
    return {
        "token_embd": (*vocab, c.n_embd),
        "position_embd": (c.n_ctx_train, c.n_embd),
        "output_norm": (c.n_embd,),
        "output": (*vocab, c.n_embd),
        **dict.fromkeys(("rope_freqs", "rope_factors_long", "rope_factors_short"), (c.rope.n_rot // 2,)),
    }


def _attention(c: Config) -> Mapping[str, tuple[int, ...]]:
    q, k, v = c.n_head * c.head_k, c.n_head_kv * c.head_k, c.n_head_kv * c.head_v
    return {
        "attn_norm": (c.n_embd,),
        "attn_q": (q, c.n_embd),
        "attn_k": (k, c.n_embd),
        "attn_v": (v, c.n_embd),
        "attn_qkv": (q + k + v, c.n_embd),
        "attn_sinks": (c.n_head,),
        "attn_q_norm": _norm_of_heads(c, c.n_head),
        "attn_k_norm": _norm_of_heads(c, c.n_head_kv),
        "attn_output": (c.n_embd, c.n_head * c.head_v),
        "post_attention_norm": (c.n_embd,),
    }


def _norm_of_heads(c: Config, n_head: int) -> tuple[int, ...]:
    return {"head": (c.head_k,), "heads": (n_head, c.head_k), "row": (n_head * c.head_k,)}[c.traits.qk_norm]


def _ffn(c: Config, w: Weights, prefix: str) -> Mapping[str, tuple[int, ...]]:
    """The width is what the layer's last matrix takes."""
    ff, shared = (
        next((w.shape(f"{prefix}{down}.weight")[-1:] for down in downs if f"{prefix}{down}.weight" in w), ())
        for downs in (("ffn_down", "ffn_down_exps"), ("ffn_down_shexp",))
    )
    if not ff:
        return {}
    up = (2 * ff[0],) if c.traits.has("FUSED_GATE") else ff
    return {
        "ffn_norm": (c.n_embd,),
        "post_ffw_norm": (c.n_embd,),
        "ffn_gate": (*ff, c.n_embd),
        "ffn_up": (*up, c.n_embd),
        "ffn_down": (c.n_embd, *ff),
        "ffn_gate_inp": (c.n_expert, c.n_embd),
        "exp_probs_b": (c.n_expert, 0),  # it has a bias and no matrix
        "ffn_gate_shexp": (*shared, c.n_embd),
        "ffn_up_shexp": (*shared, c.n_embd),
        "ffn_down_shexp": (c.n_embd, *shared),
        "ffn_gate_up_exps": (c.n_expert, 2 * ff[0], c.n_embd),
        "ffn_gate_exps": (c.n_expert, *ff, c.n_embd),
        "ffn_up_exps": (c.n_expert, *ff, c.n_embd),
        "ffn_down_exps": (c.n_expert, c.n_embd, *ff),
    }


def _latent(c: Config) -> Mapping[str, tuple[int, ...]]:
    """Q, and K and V from one row a token; attn_k_b and attn_v_b are one matrix a head."""
    x, n = c.latent, c.n_head
    if not x.n_lora_kv:
        return {}
    return {
        "attn_q": (n * x.head_k, c.n_embd),
        "attn_q_a": (x.n_lora_q, c.n_embd),
        "attn_q_a_norm": (x.n_lora_q,),
        "attn_q_b": (n * x.head_k, x.n_lora_q),
        "attn_kv_a_mqa": (x.n_lora_kv + c.rope.n_rot, c.n_embd),
        "attn_kv_a_norm": (x.n_lora_kv,),
        "attn_kv_b": (n * (x.n_nope + x.head_v), x.n_lora_kv),
        "attn_k_b": (n, x.n_lora_kv, x.n_nope),
        "attn_v_b": (n, x.head_v, x.n_lora_kv),
        "attn_output": (c.n_embd, n * x.head_v),
    }


def _scan(c: Config) -> Mapping[str, tuple[int, ...]]:
    s = c.ssm
    return {
        "ssm_in": (s.d_inner + s.conv_dim + s.n_head, c.n_embd),
        "ssm_conv1d": (s.conv_dim, s.d_conv),
        "ssm_dt": (s.n_head, 0),  # it has a bias and no matrix
        "ssm_norm": (s.n_group, s.d_inner // max(s.n_group, 1)),
        "ssm_out": (c.n_embd, s.d_inner),
    }


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """GGUF pads shapes with ones on the outside."""
    kept = list(shape)
    while kept and kept[0] == 1:
        kept.pop(0)
    return tuple(kept)
