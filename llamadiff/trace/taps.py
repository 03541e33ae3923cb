"""The vocabulary: every tap, its op, its axes and the weight that makes it. Everything else derives from it."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache


@dataclass(frozen=True)
class Kind:
    """One row of the vocabulary.

    ``inputs`` are the words it reads (``prev``: the layer's input; ``a|b``: the first that comes before it).
    ``axes`` name the dimensions, outermost first. ``weight`` is the stem of the weight the op multiplies by
    (``attn_q`` for ``blk.3.attn_q.weight``). ``needs`` are stems of tensors, or traits of the layer, without
    any of which the tap does not exist, ``without`` those with any of which it does not. A word that means something
    else in some architectures has a row for each. ``key`` marks the dozen that an engine should write first;
    an ``optional`` one is compared if it is there, and not missed if it is not.
    """

    word: str
    op: str
    inputs: str
    axes: tuple[str, ...]
    what: str
    weight: str | None = None
    needs: str = ""
    without: str = ""
    layered: bool = True
    key: bool = False
    optional: bool = False


_ROWS = ("token", "embd")
_HEADS, _KV_HEADS = ("token", "head", "dim"), ("token", "kv_head", "dim")
_MERGED, _KV_MERGED = ("token", "head*dim"), ("token", "kv_head*dim")
_SCORES = ("head", "query", "key")
_FF, _EXPERTS, _USED = ("token", "ff"), ("token", "expert"), ("token", "used")
_USED_FF, _USED_EMBD = ("token", "used", "ff_exp"), ("token", "used", "embd")
_QUERY_LORA, _FF_SHARED = ("head", "query", "lora"), ("token", "ff_shexp")
_SSM = ("token", "ssm_head", "ssm_dim")
_MOE = "ffn_gate_inp"

# Traits: PRE_NORM (attention and the FFN read a normalised input), LATE_NORM (post_attention_norm is the FFN's, after
# the residual), ATTENTION, LATENT (K and V of all heads from one row a token), FFN, FUSED_GATE (the FFN's gate and up in one matrix), SOFTMAX_WEIGHT (the router's softmax
# is of the chosen experts alone), and ggml's ops that not every layer has (ROPE, SSM_SCAN; SWIGLU, GEGLU, SWIGLU_OAI, and
# GELU without a gate).

KINDS: tuple[Kind, ...] = (
    Kind("embd", "GET_ROWS", "", _ROWS, "token embeddings, after any embedding scale", "token_embd", layered=False, key=True),
    Kind("pos_embd", "GET_ROWS", "", _ROWS, "learned vectors of the positions", "position_embd", needs="position_embd", layered=False),
    Kind("inpL", "ADD", "embd pos_embd", _ROWS, "embeddings with positions", needs="position_embd", layered=False),
    Kind("attn_norm", "RMS_NORM", "prev", _ROWS, "normalised layer input, times its weight", "attn_norm", needs="PRE_NORM", key=True),
    Kind("Qcur_proj", "MUL_MAT", "attn_norm|prev", _MERGED, "Q projection, with bias if there is one", "attn_q", needs="ATTENTION", without="attn_q_a", key=True),
    Kind("Kcur_proj", "MUL_MAT", "attn_norm|prev", _KV_MERGED, "K projection, with bias if there is one", "attn_k", needs="ATTENTION", without="LATENT"),
    Kind("Vcur_proj", "MUL_MAT", "attn_norm|prev", _KV_MERGED, "V projection, with bias if there is one", "attn_v", needs="ATTENTION", without="LATENT", key=True),
    Kind("q_a", "MUL_MAT", "attn_norm", ("token", "lora_q"), "Q's bottleneck", "attn_q_a", needs="attn_q_a"),
    Kind("q_a_norm", "RMS_NORM", "q_a", ("token", "lora_q"), "that normalised, times its weight", "attn_q_a_norm", needs="attn_q_a"),
    Kind("q_b", "MUL_MAT", "q_a_norm", _MERGED, "Q from its bottleneck", "attn_q_b", needs="attn_q_a", key=True),
    Kind("kv_cmpr_pe", "MUL_MAT", "attn_norm", ("token", "lora_rope"), "K and V compressed, and K's rotated part", "attn_kv_a_mqa", needs="LATENT", key=True),
    Kind("kv_cmpr", "RMS_NORM", "kv_cmpr_pe", ("token", "lora"), "K and V compressed, normalised", "attn_kv_a_norm", needs="LATENT"),
    Kind("k_pe", "ROPE", "kv_cmpr_pe", ("token", "one", "rope"), "K's rotated part after RoPE, one for all heads", needs="LATENT", key=True),
    Kind("kv", "MUL_MAT", "kv_cmpr", ("token", "head*nope_v"), "K and V of every head", "attn_kv_b", needs="attn_kv_b"),
    Kind("q_pe", "ROPE", "q_b|Qcur_proj", ("token", "head", "rope"), "Q's rotated part after RoPE", needs="attn_k_b", key=True),
    Kind("q_nope_absorbed", "MUL_MAT", "q_b|Qcur_proj", _QUERY_LORA, "Q's other part, ready for compressed K", "attn_k_b", needs="attn_k_b"),
    Kind("Qcur_normed", "RMS_NORM", "Qcur_proj", _HEADS, "Q after QK-norm", "attn_q_norm", needs="attn_q_norm"),
    Kind("Kcur_normed", "RMS_NORM", "Kcur_proj", _KV_HEADS, "K after QK-norm", "attn_k_norm", needs="attn_k_norm"),
    Kind("Qcur_rope", "ROPE", "Qcur_normed|q_b|Qcur_proj", _HEADS, "Q after RoPE", needs="ROPE", without="attn_k_b", key=True),
    Kind("Kcur_rope", "ROPE", "Kcur_normed|Kcur_proj", _KV_HEADS, "K after RoPE", needs="ROPE", without="LATENT", key=True),
    Kind("kv_k", "SET_ROWS", "Kcur_rope|Kcur_normed|Kcur_proj|kv k_pe", _KV_HEADS, "the cache's K rows, slot by slot", needs="ATTENTION", without="attn_k_b", optional=True),
    Kind("kv_v", "SET_ROWS", "Vcur_proj", _KV_HEADS, "the cache's V rows, slot by slot", needs="ATTENTION", without="LATENT", optional=True),
    Kind("kv_v", "SET_ROWS", "kv", ("token", "kv_head", "dim_v"), "the cache's V rows, slot by slot", needs="attn_kv_b", optional=True),
    Kind("kq", "MUL_MAT", "Qcur_rope|q_pe|Qcur_normed|Qcur_proj q_nope_absorbed kv_k|kv_cmpr k_pe", _SCORES, "raw scores, before scale and mask; the causal triangle counts", needs="ATTENTION"),
    Kind("kq_soft_max", "SOFT_MAX", "kq", _SCORES, "attention probabilities", needs="ATTENTION", key=True),
    Kind("kqv", "MUL_MAT", "kq_soft_max kv_cmpr", _QUERY_LORA, "weighted sums of compressed V", needs="attn_k_b"),
    Kind("kqv_mla", "MUL_MAT", "kqv", ("head", "query", "dim_v"), "every head's, from compressed V", "attn_v_b", needs="attn_k_b"),
    Kind("kqv_out", "MUL_MAT", "kq_soft_max kv_v", _MERGED, "heads merged, before the output projection", needs="ATTENTION", without="LATENT", key=True),
    Kind("kqv_out", "MUL_MAT", "kqv_mla|kq_soft_max kv_v", ("token", "head*dim_v"), "heads merged, before the output projection", needs="LATENT", key=True),
    Kind("attn_out", "MUL_MAT", "kqv_out", _ROWS, "after the output projection", "attn_output", needs="ATTENTION", key=True),
    Kind("attn_post_norm", "RMS_NORM", "attn_out", _ROWS, "that normalised, times its weight", "post_attention_norm", needs="post_attention_norm", without="LATE_NORM"),
    Kind("ffn_inp", "ADD", "attn_post_norm|attn_out prev", _ROWS, "residual after attention", needs="ATTENTION", key=True),
    Kind("ffn_norm", "RMS_NORM", "ffn_inp", _ROWS, "normalised FFN input, times its weight", "ffn_norm", needs="PRE_NORM FFN", without="LATE_NORM"),
    Kind("attn_post_norm", "RMS_NORM", "ffn_inp", _ROWS, "normalised FFN input, times its weight", "post_attention_norm", needs="LATE_NORM"),
    Kind("ffn_moe_logits", "MUL_MAT", "ffn_norm|attn_post_norm", _EXPERTS, "router scores", "ffn_gate_inp", needs=_MOE),
    Kind("ffn_moe_probs", "SOFT_MAX", "ffn_moe_logits", _EXPERTS, "router probabilities", needs=_MOE, without="SOFTMAX_WEIGHT"),
    Kind("ffn_moe_probs_biased", "ADD", "ffn_moe_probs", _EXPERTS, "those by which experts are chosen", needs="exp_probs_b"),
    Kind("ffn_moe_topk", "ARGSORT", "ffn_moe_probs_biased|ffn_moe_probs|ffn_moe_logits", _USED, "chosen experts' numbers, best first", needs=_MOE),
    Kind("ffn_moe_weights", "GET_ROWS", "ffn_moe_probs|ffn_moe_logits ffn_moe_topk", _USED, "their probabilities, or scores", needs=_MOE),
    Kind("ffn_moe_weights_norm", "DIV", "ffn_moe_weights", _USED, "made to sum to one", needs=f"{_MOE} NORMED_WEIGHTS", without="SOFTMAX_WEIGHT"),
    Kind("ffn_moe_weights_scaled", "SCALE", "ffn_moe_weights_norm|ffn_moe_weights", _USED, "times the experts' scale", needs=f"{_MOE} SCALED_WEIGHTS"),
    Kind("ffn_moe_weights_softmax", "SOFT_MAX", "ffn_moe_weights", _USED, "their softmax", needs="SOFTMAX_WEIGHT"),
    Kind("ffn_moe_gate", "MUL_MAT_ID", "ffn_norm|attn_post_norm ffn_moe_topk", _USED_FF, "chosen experts' gate", "ffn_gate_exps", needs=_MOE),
    Kind("ffn_moe_up", "MUL_MAT_ID", "ffn_norm|attn_post_norm ffn_moe_topk", _USED_FF, "chosen experts' up", "ffn_up_exps", needs=_MOE),
    Kind("ffn_moe_swiglu", "SWIGLU", "ffn_moe_gate ffn_moe_up", _USED_FF, "silu(gate) * up", needs=f"{_MOE} SWIGLU"),
    Kind("ffn_moe_swiglu_oai", "SWIGLU_OAI", "ffn_moe_gate ffn_moe_up", _USED_FF, "gate * sigmoid(1.702 gate) * (up + 1), clamped", needs="SWIGLU_OAI"),
    Kind("ffn_moe_down", "MUL_MAT_ID", "ffn_moe_swiglu|ffn_moe_swiglu_oai ffn_moe_topk", _USED_EMBD, "chosen experts' down", "ffn_down_exps", needs=_MOE),
    Kind("ffn_gate_shexp", "MUL_MAT", "ffn_norm", _FF_SHARED, "shared experts' gate", "ffn_gate_shexp", needs="ffn_gate_shexp"),
    Kind("ffn_up_shexp", "MUL_MAT", "ffn_norm", _FF_SHARED, "shared experts' up", "ffn_up_shexp", needs="ffn_gate_shexp"),
    Kind("ffn_gate", "MUL_MAT", "ffn_norm|ffn_inp", _FF, "gate projection", "ffn_gate", needs="FFN", without=f"{_MOE} FUSED_GATE GELU"),
    Kind("ffn_up", "MUL_MAT", "ffn_norm|ffn_inp", _FF, "up projection", "ffn_up", needs="FFN", without=f"{_MOE} FUSED_GATE"),
    Kind("ffn_up", "MUL_MAT", "ffn_norm", ("token", "gate_up"), "gate projection, then up projection", "ffn_up", needs="FUSED_GATE"),
    Kind("ffn_swiglu", "SWIGLU", "ffn_gate ffn_up", _FF, "silu(gate) * up", needs="SWIGLU", without=_MOE),
    Kind("ffn_swiglu", "SWIGLU", "ffn_gate_shexp ffn_up_shexp", _FF_SHARED, "silu(gate) * up of the shared experts", needs="ffn_gate_shexp"),
    Kind("ffn_shexp", "MUL_MAT", "ffn_swiglu", _ROWS, "shared experts, after their down projection", "ffn_down_shexp", needs="ffn_gate_shexp"),
    Kind("ffn_geglu", "GEGLU", "ffn_gate ffn_up", _FF, "gelu(gate) * up", needs="GEGLU", without=_MOE),
    Kind("ffn_gelu", "GELU", "ffn_up", _FF, "gelu(up)", needs="GELU", without=_MOE),
    Kind("ffn_out", "MUL_MAT", "ffn_moe_down|ffn_swiglu|ffn_geglu|ffn_gelu ffn_moe_weights_scaled|ffn_moe_weights_norm|ffn_moe_weights_softmax|ffn_moe_weights ffn_shexp", _ROWS, "after the down projection, or the experts' weighted sum", "ffn_down", needs="FFN", key=True),
    Kind("ffn_post_norm", "RMS_NORM", "ffn_out", _ROWS, "that normalised, times its weight", "post_ffw_norm", needs="post_ffw_norm"),
    Kind("ssm_in", "MUL_MAT", "attn_norm", ("token", "ssm_in"), "gate, input, K, Q and step of the scan", "ssm_in", needs="SSM_SCAN"),
    Kind("ssm_conv", "SSM_CONV", "ssm_in", ("token", "ssm_conv"), "input, K and Q convolved over the last tokens", "ssm_conv1d", needs="SSM_SCAN"),
    Kind("ssm_dt", "ADD", "ssm_in", ("token", "ssm_head"), "step, with its bias", needs="SSM_SCAN"),
    Kind("ssm_scan", "SSM_SCAN", "ssm_conv ssm_dt", _SSM, "what the states put out", needs="SSM_SCAN"),
    Kind("mamba2_y_add_d", "ADD", "ssm_scan ssm_conv", _SSM, "with D times the scan's input", needs="SSM_SCAN"),
    Kind("ssm_norm", "RMS_NORM", "mamba2_y_add_d ssm_in", ("token", "ssm_group", "ssm_width"), "gated, normalised by groups", "ssm_norm", needs="SSM_SCAN"),
    Kind("mamba_out", "MUL_MAT", "ssm_norm", _ROWS, "after the output projection", "ssm_out", needs="SSM_SCAN"),
    Kind("l_out", "ADD", "ffn_post_norm|ffn_out|mamba_out ffn_inp|prev", _ROWS, "residual after the layer", key=True),
    Kind("result_norm", "RMS_NORM", "prev", _ROWS, "after the final norm", "output_norm", layered=False),
    Kind("result_output", "MUL_MAT", "result_norm", ("token", "vocab"), "logits", "output", layered=False, key=True),
)  # fmt: skip

BY_WORD: Mapping[str, Kind] = {kind.word: kind for kind in (*KINDS, *reversed(KINDS))}  # the first row of each
_NAME = re.compile(r"([A-Za-z_][A-Za-z_0-9]*?)(?:-([0-9]{1,4}))?")


@dataclass(frozen=True)
class Tap:
    """A kind at a layer (None: outside the layers)."""

    kind: Kind
    layer: int | None

    @cached_property
    def name(self) -> str:
        return self.kind.word if self.layer is None else f"{self.kind.word}-{self.layer}"

    @property
    def row_axis(self) -> int:
        """The axis that runs over tokens (queries, for attention scores)."""
        return 1 if "query" in self.kind.axes else 0

    @property
    def causal(self) -> bool:
        """Whether only the causal triangle is defined."""
        return "key" in self.kind.axes


@lru_cache(maxsize=1 << 14)
def parse(name: str) -> Tap | None:
    """The tap a name stands for; None if the vocabulary does not have it."""
    match = _NAME.fullmatch(name)
    if match is None or match[1] not in BY_WORD:
        return None
    kind = BY_WORD[match[1]]
    layer = None if match[2] is None else int(match[2])
    return Tap(kind, layer) if kind.layered == (layer is not None) else None


def taps_of(tensors: Iterable[str], traits: Sequence[AbstractSet[str]]) -> Iterator[Tap]:
    """The taps of a model with these weight tensors and these traits of each layer, in graph order."""
    present = set(tensors)
    first = next(place for place, kind in enumerate(KINDS) if kind.layered)
    roots = {name.split(".")[0] for name in present}
    yield from (Tap(kind, None) for kind in KINDS[:first] if roots.issuperset(kind.needs.split()))
    for layer, own in enumerate(traits):
        stems = {name.split(".")[2] for name in present if name.startswith(f"blk.{layer}.") and name.count(".") >= 3}
        stems |= own
        for kind in KINDS:
            if kind.layered and stems.issuperset(kind.needs.split()) and stems.isdisjoint(kind.without.split()):
                yield Tap(kind, layer)
    yield from (Tap(kind, None) for kind in KINDS[first:] if not kind.layered)


def input_of(layer: int, present: Container[str]) -> str:
    """The tap that is a layer's input; that of the layer after the last is what the model goes on with."""
    return f"l_out-{layer - 1}" if layer else "inpL" if "inpL" in present else "embd"


def inputs_of(tap: Tap, before: Container[str], n_layer: int) -> list[str]:
    """Names of the taps that an op reads, of those that come ``before`` it."""
    previous = input_of(n_layer if tap.layer is None else tap.layer, before)
    suffix = "" if tap.layer is None else f"-{tap.layer}"
    names = []
    for alternatives in tap.kind.inputs.split():
        candidates = [previous if word == "prev" else word + suffix for word in alternatives.split("|")]
        names += [name for name in candidates if name in before][:1]
    return names


def with_norm(tap: Tap, op: str) -> Tap:
    """The same tap where the architecture's norms are another op (LayerNorm: NORM)."""
    return replace(tap, kind=replace(tap.kind, op=op)) if tap.kind.op == "RMS_NORM" else tap


def weight_name(tap: Tap, tensors: Iterable[str]) -> str | None:
    """The weight tensor that makes a tap, of those in the file: the tied embedding where there is no output head."""
    if tap.kind.weight is None:
        return None
    present = set(tensors)
    prefix = "" if tap.layer is None else f"blk.{tap.layer}."
    alternatives = {"output": "token_embd", "attn_q": "attn_qkv", "attn_k": "attn_qkv", "attn_v": "attn_qkv",
                    "ffn_down": "ffn_down_exps", "ffn_gate_exps": "ffn_gate_up_exps",
                    "ffn_up_exps": "ffn_gate_up_exps"}  # fmt: skip
    for stem in (tap.kind.weight, alternatives.get(tap.kind.weight)):
        if stem is not None and f"{prefix}{stem}.weight" in present:
            return f"{prefix}{stem}.weight"
    return None


def shape_of(tap: Tap, n_tokens: int, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a tap over ``n_tokens``; ``sizes`` gives embd, head, kv_head, dim, ff, vocab, expert, used."""
    known = {**sizes, "token": n_tokens, "query": n_tokens, "key": n_tokens}
    return tuple(size_of(axis, known) for axis in tap.kind.axes)


def size_of(axis: str, sizes: Mapping[str, int]) -> int:
    """The size of an axis; those of graphs have no other name than it."""
    return math.prod(sizes[part] if part in sizes else int(part) for part in axis.split("*"))


def is_selected(name: str, layer: int | None, patterns: Sequence[str], layers: range | None) -> bool:
    """Whether a tap is asked for: by name patterns (``l_out-*``; none: all) and by layer (taps outside always)."""
    by_name = not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)
    return by_name and (layers is None or layer is None or layer in layers)


def layer_of(name: str) -> int | None:
    """The layer that a name ends in: 3 of ``l_out-3``."""
    match = re.fullmatch(".+-([0-9]{1,9})", name)
    return int(match[1]) if match else None


LOGITS, RESIDUAL = "result_output", "l_out"
WEIGHTS = "weights/"  # begins the name of a weight that a trace holds beside its taps
