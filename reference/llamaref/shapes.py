"""What shape every weight must have, from the configuration: a file that says otherwise cannot be run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from llamaref.errors import ModelError

if TYPE_CHECKING:
    from llamaref.config import Config
    from llamaref.weights import Weights

_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias|scale)")


def check_shapes(c: Config, w: Weights) -> None:
    """Raise ModelError for a number of layers or the shape of a tensor that is not what the metadata implies."""
    matches = {name: match for name in w if (match := _NAME.fullmatch(name))}
    layers = {int(match[1]) for match in matches.values() if match[1] is not None}
    if layers != set(range(len(layers))) or len(layers) != c.n_layer:
        raise ModelError(f"block_count = {c.n_layer}: the file has tensors of {len(layers)} layers")
    for name, match in matches.items():
        found, wanted = w.shape(name), _shape(c, w, match)
        if wanted is not None and _without_ones(found) != _without_ones(wanted):
            rows = f"rows of {found[-1] if found else 1} weights, shape {list(found)}"
            raise ModelError(f"{name}: {rows}; the metadata implies {list(wanted)}")


def _shape(c: Config, w: Weights, match: re.Match[str]) -> tuple[int, ...] | None:
    """The shape of one tensor; None if no product or norm of the engine reads it."""
    layer, stem, part = match.groups()
    prefix = "" if layer is None else f"blk.{layer}."
    table = _outside(c, w) if layer is None else {**_attention(c), **_ffn(c, w, prefix)}
    weight = table.get(stem)
    if weight is None or part == "weight":
        return weight
    if len(weight) == 1:  # a norm: it has neither
        return None
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
    if c.n_lora_kv:  # latent: one row a token is K and V of all heads
        q, v = c.n_head * c.head_k_mla, c.head_v_mla
    head_v = c.head_v_mla or c.head_v
    s = c.ssm
    return {
        "ssm_in": (s.d_inner + s.conv_dim + s.n_head, c.n_embd),
        "ssm_conv1d": (s.conv_dim, s.d_conv),
        "ssm_dt": (s.n_head, 0),  # a bias without a matrix
        "ssm_norm": (s.n_group, s.d_inner // max(s.n_group, 1)),
        "ssm_out": (c.n_embd, s.d_inner),
        "attn_q_a": (c.n_lora_q, c.n_embd),
        "attn_q_a_norm": (c.n_lora_q,),
        "attn_q_b": (q, c.n_lora_q),
        "attn_kv_a_mqa": (c.n_lora_kv + c.rope.n_rot, c.n_embd),
        "attn_kv_a_norm": (c.n_lora_kv,),
        "attn_kv_b": (c.n_head * (c.n_nope + c.head_v_mla), c.n_lora_kv),
        "attn_k_b": (c.n_head, c.n_lora_kv, c.n_nope),
        "attn_v_b": (c.n_head, c.head_v_mla, c.n_lora_kv),
        "attn_norm": (c.n_embd,),
        "attn_q": (q, c.n_embd),
        "attn_k": (k, c.n_embd),
        "attn_v": (v, c.n_embd),
        "attn_qkv": (q + k + v, c.n_embd),
        "attn_q_norm": (c.n_head, c.head_k) if c.architecture == "stablelm" else (c.head_k,),
        "attn_k_norm": (c.n_head_kv, c.head_k) if c.architecture == "stablelm" else (c.head_k,),
        "attn_output": (c.n_embd, c.n_head * head_v),
        "attn_sinks": (c.n_head,),
        "post_attention_norm": (c.n_embd,),
    }


def _ffn(c: Config, w: Weights, prefix: str) -> Mapping[str, tuple[int, ...]]:
    """The width is what the layer's gate has; without a gate, what its last matrix takes."""
    gates = [f"{prefix}{stem}.weight" for stem in ("ffn_gate", "ffn_gate_exps")]
    ff = next((w.shape(gate)[-2:-1] for gate in gates if gate in w), None)
    if ff is None and f"{prefix}ffn_down.weight" in w:
        ff = w.shape(f"{prefix}ffn_down.weight")[-1:]
    if ff is None and f"{prefix}ffn_gate_up_exps.weight" in w:
        ff = w.shape(f"{prefix}ffn_down_exps.weight")[-1:]
    if ff is None:
        return {}
    shared = f"{prefix}ffn_gate_shexp.weight"
    ff_shared = w.shape(shared)[-2:-1] if shared in w else ff
    up = (2 * ff[0],) if c.architecture == "phi3" else ff  # gate and up in one matrix
    return {
        "ffn_norm": (c.n_embd,),
        "ffn_gate": (*ff, c.n_embd),
        "ffn_up": (*up, c.n_embd),
        "ffn_down": (c.n_embd, *ff),
        "ffn_gate_inp": (c.n_expert, c.n_embd),
        "ffn_gate_shexp": (*ff_shared, c.n_embd),
        "ffn_up_shexp": (*ff_shared, c.n_embd),
        "ffn_down_shexp": (c.n_embd, *ff_shared),
        "ffn_gate_up_exps": (c.n_expert, 2 * ff[0], c.n_embd),
        "ffn_gate_exps": (c.n_expert, *ff, c.n_embd),
        "ffn_up_exps": (c.n_expert, *ff, c.n_embd),
        "ffn_down_exps": (c.n_expert, c.n_embd, *ff),
    }


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """GGUF pads shapes with ones on the outside."""
    kept = list(shape)
    while kept and kept[0] == 1:
        kept.pop(0)
    return tuple(kept)
