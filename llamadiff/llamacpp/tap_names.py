"""Which node of llama.cpp's graph is which tap: one pure function of name, op and sources."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from llamadiff.trace.taps import BY_WORD

if TYPE_CHECKING:
    from llamadiff.llamacpp.tensors import Tensor

# A product with a weight is known by the weight, and so is what adds its bias or multiplies by its scale.
_BY_WEIGHT: Mapping[str, str] = {
    kind.weight: kind.word for kind in BY_WORD.values() if kind.weight is not None and kind.op != "GET_ROWS"
}
_BY_BIAS = {"ssm_dt": "ssm_dt"}  # one that no product has
_WEIGHT = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias|scale)")
# op -> which source the weight is
_WEIGHT_OPS = {"MUL_MAT": 0, "MUL_MAT_ID": 0, "MUL": 1, "ADD": 1, "ADD_ID": 1, "SSM_CONV": 1}

# Everything else is known by llama.cpp's own name and the op: tap -> name:OP of its nodes. Fused projections are split
# by VIEW, then CONT; flash attention's result is taken by RESHAPE; attn_pregate comes before a gate.
_NODES: Mapping[str, str] = {
    "embd": "embd:GET_ROWS embd:ADD inp_embd:GET_ROWS embd:SCALE inp_scaled:SCALE model.embed_tokens:GET_ROWS",
    "pos_embd": "pos_embd:GET_ROWS",
    "inpL": "inpL:ADD",
    "Qcur_proj": "Qcur:VIEW Qcur:CONT",
    "Kcur_proj": "Kcur:VIEW Kcur:CONT",
    "Vcur_proj": "Vcur:VIEW Vcur:CONT",
    "Qcur_rope": "Qcur:ROPE",
    "Kcur_rope": "Kcur:ROPE",
    "q_pe": "q_pe:ROPE",
    "k_pe": "k_pe:ROPE",
    "kq": "kq:MUL_MAT",
    "kq_soft_max": "kq_soft_max:SOFT_MAX",
    "kqv_out": "kqv_out:CONT kqv_out:RESHAPE attn_pregate:CONT attn_pregate:RESHAPE",
    "ffn_inp": "ffn_inp:ADD sa_out:ADD",
    "ffn_moe_probs": "ffn_moe_probs:SOFT_MAX ffn_moe_probs:SIGMOID",
    "ffn_moe_probs_biased": "ffn_moe_probs_biased:ADD",
    "ffn_moe_topk": "ffn_moe_topk:VIEW",
    "ffn_moe_weights": "ffn_moe_weights:GET_ROWS",
    "ffn_moe_weights_norm": "ffn_moe_weights_norm:DIV",
    "ffn_moe_weights_softmax": "ffn_moe_weights_softmax:RESHAPE",
    "ffn_moe_swiglu_oai": "ffn_moe_swiglu_oai:SWIGLU_OAI",
    "ffn_moe_swiglu": "ffn_moe_swiglu:SWIGLU",
    "ffn_moe_weights_scaled": "ffn_moe_weights_scaled:SCALE",
    "ffn_moe_gate": "ffn_moe_gate:VIEW ffn_moe_gate_scaled:MUL",
    "ffn_moe_up": "ffn_moe_up:VIEW ffn_moe_up_scaled:MUL",
    "ffn_moe_down": "ffn_moe_down_scaled:MUL",
    "ffn_out": "ffn_moe_out:ADD ffn_moe_out:CONT ffn_out:ADD",
    "ffn_swiglu": "ffn_swiglu:SWIGLU",
    "ffn_geglu": "ffn_geglu:GEGLU",
    "ffn_gelu": "ffn_gelu:GELU",
    "mamba2_y_add_d": "mamba2_y_add_d:ADD",
    "l_out": "l_out:ADD",
    "result_output": "result_output:SCALE",
}
_BY_NAME = {tuple(node.split(":")): tap for tap, nodes in _NODES.items() for node in nodes.split()}
# op, which source, its name, tap: the weight that a scan reads, V that is a part of K's rows, and what follows LFM2's
# nodes, which are named as in its checkpoint
_BY_SOURCE = tuple((op, place, re.compile(pattern), word) for op, place, pattern, word in (
    ("SSM_SCAN", 3, r"blk\.(\d+)\.ssm_a", "ssm_scan"),
    ("MUL_MAT", 0, r"v_cont-(\d+)", "kqv"),
    ("ROPE", 0, r"model\.layers\.\{\}\.self_attn\.q_layernorm-(\d+)", "Qcur_rope"),
    ("ROPE", 0, r"model\.layers\.\{\}\.self_attn\.k_layernorm-(\d+)", "Kcur_rope"),
    ("ADD", 1, r"model\.layers\.\{\}\.(?:self_attn|conv)\.out_proj-(\d+)(?: \(reshaped\))?", "ffn_inp"),
))  # fmt: skip
_NODE = re.compile(r"([\w.]+?)(?:-(\d+))?")
_NAMELESS = re.compile(r"node_\d+")  # ggml numbers the nodes that llama.cpp gave no name
_KEYS = re.compile(r"(?:cache_k_l|Kcur-)(\d+)(?: \((?:view|reshaped|permuted)\))*")  # as a product with Q reads them
_SCORES = re.compile(r"kq-(\d+)")


def tap_name(name: str, op: str, sources: Sequence[str]) -> str | None:
    """The tap that a node is, from its name, its op and its sources' names; None if it is none.

    Several nodes may be one tap (a product, then its bias): the last of them holds the tap's value.
    """
    by_source = _tap_of_weight(op, sources) or _tap_of_source(op, sources)
    if by_source is not None:
        return by_source
    if _NAMELESS.fullmatch(name):
        return _nameless(op, sources)
    match = _NODE.fullmatch(name)
    word = _BY_NAME.get((match[1], op)) if match else None
    if match is None or word is None or BY_WORD[word].layered != (match[2] is not None):
        return None
    return word if match[2] is None else f"{word}-{match[2]}"


def tap_of(node: Tensor, sources: Sequence[Tensor] | None = None) -> str | None:
    """The tap that a node is, or would be with other ``sources``.

    Older versions of llama.cpp do not name scores: those are told by the keys that they are made from.
    """
    nameless = _NAMELESS.fullmatch(node.name) is not None
    given = node.sources if sources is None else sources
    if node.op == "ADD" and (weight := _adapted(given[1])):
        return _tap_of_weight("MUL_MAT", [weight])
    return tap_name(node.name, node.op, [_name_of(source) if nameless else source.name for source in given])


def _adapted(added: Tensor) -> str:
    """The weight whose product an adapter's s B (A x) is added to; empty for other sums, embedding rows among them."""
    made = added.sources[0] if added.op == "SCALE" else added
    weight, _, end = made.sources[0].name.rpartition(".") if made.op in ("MUL_MAT", "MUL_MAT_ID") else ("", "", "")
    return weight if end == "lora_b" and weight != "token_embd.weight" else ""


def _name_of(source: Tensor) -> str:
    is_product = source.op == "MUL_MAT" and _NAMELESS.fullmatch(source.name) is not None
    return (tap_of(source) if is_product else None) or source.name


def _nameless(op: str, sources: Sequence[str]) -> str | None:
    """A node without a name of its own, by its sources."""
    if op == "ADD":
        return _residual(sources[1])
    if op == "MUL_MAT" and (keys := _KEYS.fullmatch(sources[0])) and not _NAMELESS.fullmatch(sources[1]):
        return f"kq-{keys[1]}"
    if op == "SOFT_MAX" and (scores := _SCORES.fullmatch(sources[0])):
        return f"kq_soft_max-{scores[1]}"
    return None


def _residual(source: str) -> str | None:
    """What is added to a layer's input, without a name, is the residual after attention."""
    if source in ("embd", "inpL"):
        return "ffn_inp-0"
    match = re.fullmatch(r"l_out-(\d+)", source)
    return f"ffn_inp-{int(match[1]) + 1}" if match else None


def _tap_of_source(op: str, sources: Sequence[str]) -> str | None:
    """What a source's name alone tells."""
    for own, place, pattern, word in _BY_SOURCE:
        match = pattern.fullmatch(sources[place]) if op == own and place < len(sources) else None
        if match is not None:
            return f"{word}-{match[1]}"
    return None


def _tap_of_weight(op: str, sources: Sequence[str]) -> str | None:
    place = _WEIGHT_OPS.get(op)
    if place is None or place >= len(sources):
        return None
    match = _WEIGHT.fullmatch(sources[place])
    if match is None:
        return None
    stem = "output" if match[2] == "token_embd" else match[2]
    word = _BY_WEIGHT.get(stem) or _BY_BIAS.get(stem)
    if word is None or BY_WORD[word].layered != (match[1] is not None):
        return None
    return word if match[1] is None else f"{word}-{match[1]}"
