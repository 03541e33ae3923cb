"""Options of small models whose tensors are not llama's: one function an architecture."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf.quants import quantize

from models.small import DIM, EMBD, FF

_RNG = np.random.default_rng(11)
Options = dict[str, Any]


def matrix(*shape: int) -> np.ndarray:
    return (_RNG.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)


def vector(*shape: int, mean: float = 0.0) -> np.ndarray:
    return (mean + 0.3 * _RNG.standard_normal(shape)).astype(np.float32)


def both(tensors: Iterable[tuple[str, Any]], layers: Iterable[int] = (0, 1)) -> dict[str, np.ndarray]:
    """Tensors of every layer: (name, what makes one)."""
    return {f"blk.{i}.{name}": make() for i in layers for name, make in tensors}


def phi3(n_rot: int = DIM, **extra: Any) -> Options:
    """Gate and up in one matrix, and factors for contexts longer and shorter than the original."""
    sides = {"long": 9, "short": 3}
    factors = {
        f"rope_factors_{side}.weight": np.linspace(1, last, n_rot // 2, dtype=np.float32)
        for side, last in sides.items()
    }
    return {
        "arch": "phi3", "kv_heads": 4, "drop": ("ffn_gate", "ffn_up"),
        "extra": {"rope.dimension_count": n_rot, **extra},
        "tensors": {**both([("ffn_up.weight", lambda: matrix(2 * FF, EMBD))]), **factors},
    }  # fmt: skip


def gpt2() -> Options:
    """Learned positions, one matrix for Q, K and V, biases throughout, no gate."""
    sizes = {"attn_qkv": 3 * EMBD, "attn_output": EMBD, "ffn_up": FF, "ffn_down": EMBD}
    return {
        "arch": "gpt2", "kv_heads": 4, "fused_qkv": True, "layer_norm": True, "drop": ("ffn_gate",), "tied": True,
        "extra": {"attention.layer_norm_epsilon": 1e-5, "attention.layer_norm_rms_epsilon": None},
        "tensors": {
            "position_embd.weight": vector(256, EMBD),
            **both([(f"{stem}.bias", lambda size=size: vector(size)) for stem, size in sizes.items()]),
        },
    }  # fmt: skip


def gpt_oss(experts_as: Type | None = None, **extra: Any) -> Options:
    """Sinks, a window of three keys in the first layer, experts with biases, values that OAI-SwiGLU clamps."""

    def of_kind(values: np.ndarray) -> Any:
        return values if experts_as is None else (quantize(values, experts_as), experts_as)

    sizes = {"attn_output": EMBD, "ffn_gate_inp": 4}
    shapes = {"gate": (4, FF, EMBD), "up": (4, FF, EMBD), "down": (4, EMBD, FF)}
    return {
        "arch": "gpt-oss", "bias": True, "experts": 4, "drop": ("ffn_norm",),
        "extra": {"attention.sliding_window": 3, **extra},
        "tensors": both([
            ("attn_sinks.weight", lambda: vector(4)),
            ("post_attention_norm.weight", lambda: vector(EMBD, mean=1.0)),
            *((f"{stem}.bias", lambda size=size: vector(size)) for stem, size in sizes.items()),
            *((f"ffn_{part}_exps.bias", lambda shape=shape: vector(*shape[:2])) for part, shape in shapes.items()),
            *((f"ffn_{part}_exps.weight", lambda shape=shape: of_kind(4 * matrix(*shape)))
              for part, shape in shapes.items()),
        ]),
    }  # fmt: skip


def mamba2(n_heads: int = 8, groups: int = 2, width: int = 4) -> Options:
    """Eight heads in two groups; no attention, as its files say."""
    inner, state = 512, 32
    channels = inner + 2 * groups * state
    tensors = [
        ("ssm_in.weight", lambda: matrix(inner + channels + n_heads, EMBD)),
        ("ssm_conv1d.weight", lambda: matrix(channels, width)),
        ("ssm_conv1d.bias", lambda: vector(channels)),
        ("ssm_dt.bias", lambda: vector(n_heads)),
        ("ssm_a", lambda: -np.exp(vector(n_heads, 1))),
        ("ssm_d", lambda: vector(n_heads, 1)),
        ("ssm_norm.weight", lambda: vector(groups, inner // groups, mean=1.0)),
        ("ssm_out.weight", lambda: matrix(EMBD, inner)),
    ]
    return {
        "arch": "mamba2", "tensors": both(tensors),
        "drop": ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"),
        "extra": {
            "attention.head_count": 0, "attention.head_count_kv": None, "attention.key_length": None,
            "attention.value_length": None, "feed_forward_length": 0, "ssm.conv_kernel": width,
            "ssm.inner_size": inner, "ssm.state_size": state, "ssm.time_step_rank": n_heads, "ssm.group_count": groups,
        },
    }  # fmt: skip


def deepseek2(*, absorbed: bool, **extra: Any) -> Options:
    """A dense layer, then experts. Absorbed: everything that DeepSeek V3 has; else as in old lite files of V2."""
    nope, rope, value, lora, narrow, n_heads, ff, n_expert = 64, 32, 64, 128, 96, 4, 128, 8
    heads = n_heads * (nope + rope)
    attention = [
        ("attn_kv_a_mqa.weight", lambda: matrix(lora + rope, EMBD)),
        ("attn_kv_a_norm.weight", lambda: vector(lora, mean=1.0)),
        ("attn_output.weight", lambda: matrix(EMBD, n_heads * value)),
    ]
    experts = [
        ("ffn_gate_inp.weight", lambda: matrix(n_expert, EMBD)),
        ("ffn_down_exps.weight", lambda: matrix(n_expert, EMBD, ff)),
        ("ffn_gate_shexp.weight", lambda: matrix(2 * ff, EMBD)),
        ("ffn_up_shexp.weight", lambda: matrix(2 * ff, EMBD)),
        ("ffn_down_shexp.weight", lambda: matrix(EMBD, 2 * ff)),
    ]
    metadata = {
        "rope.dimension_count": rope, "attention.kv_lora_rank": lora, "leading_dense_block_count": 1,
        "expert_count": n_expert, "expert_used_count": 3, "expert_shared_count": 2, "expert_feed_forward_length": ff,
        "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64,
    }  # fmt: skip
    if absorbed:
        attention += [
            ("attn_q_a.weight", lambda: matrix(narrow, EMBD)),
            ("attn_q_a_norm.weight", lambda: vector(narrow, mean=1.0)),
            ("attn_q_b.weight", lambda: matrix(heads, narrow)),
            ("attn_k_b.weight", lambda: matrix(n_heads, lora, nope)),
            ("attn_v_b.weight", lambda: matrix(n_heads, value, lora)),
        ]
        experts += [
            ("exp_probs_b.bias", lambda: vector(n_expert)),
            ("ffn_gate_up_exps.weight", lambda: matrix(n_expert, 2 * ff, EMBD)),
        ]
        metadata |= {
            "attention.q_lora_rank": narrow, "attention.key_length": lora + rope, "attention.value_length": lora,
            "attention.key_length_mla": nope + rope, "attention.value_length_mla": value, "expert_group_count": 4,
            "expert_group_used_count": 2, "expert_weights_scale": 2.5, "expert_weights_norm": True,
            "expert_gating_func": 2, "rope.scaling.yarn_log_multiplier": 0.0707,
        }  # fmt: skip
    else:
        attention += [
            ("attn_q.weight", lambda: matrix(heads, EMBD)),
            ("attn_kv_b.weight", lambda: matrix(n_heads * (nope + value), lora)),
        ]
        experts += [(f"ffn_{part}_exps.weight", lambda: matrix(n_expert, ff, EMBD)) for part in ("gate", "up")]
        metadata |= {
            "attention.q_lora_rank": 0, "attention.key_length": nope + rope, "attention.value_length": value,
        }  # fmt: skip
    dense = [(f"ffn_{part}.weight", lambda: matrix(FF, EMBD)) for part in ("gate", "up")]
    dense.append(("ffn_down.weight", lambda: matrix(EMBD, FF)))
    return {
        "arch": "deepseek2", "kv_heads": 1 if absorbed else n_heads, "extra": {**metadata, **extra},
        "drop": ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"),
        "tensors": {**both(attention), **both(dense, [0]), **both(experts, [1])},
    }  # fmt: skip


def bloom() -> Options:
    """ALiBi for positions, a norm of the embedding, one matrix for Q, K and V, biases throughout."""
    sizes = {"attn_qkv": 3 * EMBD, "attn_output": EMBD, "ffn_up": FF, "ffn_down": EMBD}
    return {
        "arch": "bloom", "kv_heads": 4, "fused_qkv": True, "layer_norm": True, "drop": ("ffn_gate",), "tied": True,
        "extra": {"attention.layer_norm_epsilon": 1e-5, "attention.layer_norm_rms_epsilon": None},
        "tensors": {
            "token_embd_norm.weight": vector(EMBD, mean=1.0), "token_embd_norm.bias": vector(EMBD),
            **both([(f"{stem}.bias", lambda size=size: vector(size)) for stem, size in sizes.items()]),
        },
    }  # fmt: skip


def falcon() -> Options:
    """Attention and FFN side by side, each with a norm of its own (as in the 40B), two KV heads, no biases."""
    norms = [("attn_norm_2.weight", lambda: vector(EMBD, mean=1.0)), ("attn_norm_2.bias", lambda: vector(EMBD))]
    return {
        "arch": "falcon", "fused_qkv": True, "layer_norm": True, "drop": ("ffn_gate", "ffn_norm"),
        "extra": {"attention.layer_norm_epsilon": 1e-5, "attention.layer_norm_rms_epsilon": None},
        "tensors": both(norms),
    }  # fmt: skip


def lfm2() -> Options:
    """A short convolution in the first layer, attention with QK-norm in the second."""
    attention = [(f"attn_{side}.weight", lambda side=side: matrix(EMBD if side == "q" else 2 * DIM, EMBD))
                 for side in "qkv"]  # fmt: skip
    attention += [(f"attn_{side}_norm.weight", lambda: vector(DIM, mean=1.0)) for side in "qk"]
    attention.append(("attn_output.weight", lambda: matrix(EMBD, EMBD)))
    convolution = [
        ("shortconv.in_proj.weight", lambda: matrix(3 * EMBD, EMBD)),
        ("shortconv.conv.weight", lambda: matrix(EMBD, 3)),
        ("shortconv.out_proj.weight", lambda: matrix(EMBD, EMBD)),
    ]
    return {
        "arch": "lfm2", "tied": True, "drop": ("attn_q", "attn_k", "attn_v", "attn_output", "output_norm"),
        "extra": {"attention.head_count_kv": [0, 2], "shortconv.l_cache": 3},
        "tensors": {
            "token_embd_norm.weight": vector(EMBD, mean=1.0), **both(convolution, [0]), **both(attention, [1]),
        },
    }  # fmt: skip


def granitehybrid() -> Options:
    """A state space in the first layer, attention without positions in the second; experts and a shared one."""
    inner, state, n_heads, n_expert, ff = 512, 32, 8, 4, 128
    attention = [(f"attn_{side}.weight", lambda side=side: matrix(EMBD if side == "q" else 2 * DIM, EMBD))
                 for side in "qkv"]  # fmt: skip
    attention.append(("attn_output.weight", lambda: matrix(EMBD, EMBD)))
    shapes = {"gate": (n_expert, FF, EMBD), "up": (n_expert, FF, EMBD), "down": (n_expert, EMBD, FF)}
    shared = {"gate": (ff, EMBD), "up": (ff, EMBD), "down": (EMBD, ff)}
    experts = [
        ("ffn_gate_inp.weight", lambda: matrix(n_expert, EMBD)),
        *((f"ffn_{part}_exps.weight", lambda shape=shape: matrix(*shape)) for part, shape in shapes.items()),
        *((f"ffn_{part}_shexp.weight", lambda shape=shape: matrix(*shape)) for part, shape in shared.items()),
    ]
    recurrent = mamba2(n_heads, 1)
    space = {name: values for name, values in recurrent["tensors"].items() if name.startswith("blk.0.")}
    return {
        "arch": "granitehybrid",
        "drop": ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"),
        "extra": {
            "attention.head_count_kv": [0, 2], "rope.dimension_count": DIM, "rope.scaling.finetuned": False,
            "ssm.conv_kernel": 4, "ssm.inner_size": inner, "ssm.state_size": state, "ssm.time_step_rank": n_heads,
            "ssm.group_count": 1, "expert_count": n_expert, "expert_used_count": 2, "expert_feed_forward_length": FF,
            "expert_shared_feed_forward_length": ff, "attention.scale": 0.1, "embedding_scale": 12.0,
            "residual_scale": 0.22, "logit_scale": 6.0,
        },
        "tensors": {**space, **both(attention, [1]), **both(experts)},
    }  # fmt: skip
