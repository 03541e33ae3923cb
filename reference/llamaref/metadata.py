"""Which metadata keys matter to a forward pass, and what each must say for the engine to be right.

A key the engine does not know might change the computation, so it is an error that names the key:
a reference that silently ignores a hyper-parameter is worse than none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from llamaref.errors import ModelError

# Read by config.py.
IMPLEMENTED = frozenset({
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "expert_count", "expert_used_count",
    "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear",
    "rope.scaling.attn_factor", "rope.scaling.original_context_length",
})  # fmt: skip

_WINDOW = frozenset({"attention.sliding_window", "attention.sliding_window_pattern"})

# Read by config.py for these architectures only.
OWN: Mapping[str, frozenset[str]] = {
    "gemma2": _WINDOW | {
        "attention.scale", "attn_logit_softcapping", "final_logit_softcapping", "rope.freq_base_swa",
    },
    "gemma3": _WINDOW | {"attention.scale", "final_logit_softcapping", "rope.freq_base_swa"},
    "gpt-oss": _WINDOW | {"rope.freq_base_swa"},
    "granite": frozenset({
        "attention.scale", "embedding_scale", "residual_scale", "logit_scale", "rope.scaling.finetuned",
    }),
    "mamba2": frozenset({
        "ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank", "ssm.group_count",
        "attention.recurrent_layers",  # all of them, whatever it says
    }),
    "olmo2": _WINDOW,
    "phi3": frozenset({"attention.sliding_window"}),  # llama.cpp does not heed it (src/models/phi3.cpp)
}  # fmt: skip

# Describe the file or its training; no forward pass depends on them.
DESCRIPTIVE = frozenset({
    "rope.scaling.finetuned", "tensor_data_layout", "attention.causal", "pooling_type", "expert_feed_forward_length",
})  # fmt: skip

# Belong to other architectures: llama.cpp writes them into its own test files with these values and
# does not read them for the engine's architectures (llama.cpp, src/models).
FOREIGN: Mapping[str, Any] = {
    "expert_gating_func": 1,  # softmax, which is what these architectures do
    "attn_logit_softcapping": 50.0,
    "router_logit_softcapping": 30.0,
    "final_logit_softcapping": 30.0,
    "expert_group_scale": 0.05,
    "deepstack_mapping": -1,
    "decoder_start_token_id": -1,
    "token_shift_count": 2,
    "attention.rope_pattern": 1,
    "attention.indexer.kpool_select_tail": True,
    "rope.scaling.yarn_ext_factor": -1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
    "kda.gate_lower_bound": -math.inf,
    "activation.situ_beta": 1.0,
}

# Sliding-window twins of keys of full attention: without a window they describe no layer, and with one config.py
# reads them.
WINDOW_TWINS = frozenset({
    "attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa", "rope.freq_base_swa",
})  # fmt: skip


def is_unset(value: Any) -> bool:
    """Whether a value says "not used": zero, false, empty, or an array of nothing else.

    llama.cpp takes zero as unset for the keys that switch a computation on.
    """
    if isinstance(value, list):
        return all(is_unset(item) for item in value)
    return not value


def _is_foreign(key: str, value: Any) -> bool:
    if key not in FOREIGN:
        return False
    expected = FOREIGN[key]
    items = value if isinstance(value, list) else [value]
    return all(_same(item, expected) for item in items)


def _same(value: Any, expected: Any) -> bool:
    if isinstance(expected, float) and isinstance(value, (int, float)):
        return math.isclose(value, expected, rel_tol=1e-6)
    return bool(value == expected)


def implemented(architecture: str) -> frozenset[str]:
    """The keys that config.py reads for an architecture."""
    return IMPLEMENTED | OWN.get(architecture, frozenset())


def refuse_unknown(architecture: str, fields: Mapping[str, Any]) -> None:
    """Raise ModelError naming every key of ``architecture`` that may change the result and is not implemented."""
    prefix = f"{architecture}."
    unknown = []
    for name, value in fields.items():
        key = name.removeprefix(prefix)
        if not name.startswith(prefix) or key in implemented(architecture) | DESCRIPTIVE | WINDOW_TWINS:
            continue
        if not is_unset(value) and not _is_foreign(key, value):
            unknown.append(f"{name} = {_brief(value)}")
    if fields.get(prefix + "attention.causal", True) is not True:
        unknown.append(f"{prefix}attention.causal = False")
    if unknown:
        raise ModelError(f"metadata that the engine does not implement: {', '.join(unknown)}")


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
