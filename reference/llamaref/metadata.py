"""Metadata: which keys matter to a forward pass, what each must say for the engine to be right, and how they are read.

A key the engine does not know might change the computation, so it is an error that names the key:
a reference that silently ignores a hyper-parameter is worse than none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from llamaref.config import Traits
from llamaref.errors import ModelError

# Read by configure.py.
IMPLEMENTED = frozenset({
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "expert_count", "expert_used_count",
    "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear",
    "rope.scaling.attn_factor", "rope.scaling.original_context_length",
})  # fmt: skip

# Read by configure.py where an architecture has windows.
WINDOW = frozenset({"attention.sliding_window", "attention.sliding_window_pattern"})

# Describe the file or its training; no forward pass depends on them.
DESCRIPTIVE = frozenset({
    "rope.scaling.finetuned", "tensor_data_layout", "attention.causal", "pooling_type", "expert_feed_forward_length",
    "classifier.output_labels", "classifier.pooling_type",
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

# Sliding-window twins of keys of full attention: without a window they describe no layer, and with one
# configure.py reads them.
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


def implemented_keys(traits: Traits) -> frozenset[str]:
    """The keys that are read for an architecture."""
    return IMPLEMENTED | set(traits.keys.split()) | (WINDOW if traits.windows is not None else frozenset())


def refuse_unknown(architecture: str, traits: Traits, fields: Mapping[str, Any]) -> None:
    """Raise ModelError naming every key of ``architecture`` that may change the result and is not implemented."""
    prefix, known = f"{architecture}.", implemented_keys(traits) | DESCRIPTIVE | WINDOW_TWINS
    unknown = []
    for name, value in fields.items():
        key = name.removeprefix(prefix)
        if not name.startswith(prefix) or key in known:
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


class Reader:
    """Typed access to the keys of one architecture."""

    def __init__(self, architecture: str, fields: Mapping[str, Any]) -> None:
        self.architecture, self.prefix = architecture, f"{architecture}."
        self.fields = fields

    def value(self, key: str, default: Any) -> Any:
        value = self.fields.get(self.prefix + key, default)
        if value is None:
            raise ModelError(f"metadata key {self.prefix}{key} is missing: without it the model cannot be run")
        if isinstance(value, list):
            if not value or any(item != value[0] for item in value):
                raise ModelError(f"{self.prefix}{key} differs between layers: the engine implements one value for all")
            value = value[0]
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number >= 0; zero counts as unset where there is a default."""
        value = self.value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ModelError(f"{self.prefix}{key} = {value!r}: expected a whole number")
        if value == 0 and default is None:
            raise ModelError(f"{self.prefix}{key} = 0: expected at least 1")
        return value or default or 0

    def number(self, key: str, default: float | None = None) -> float:
        value = self.value(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ModelError(f"{self.prefix}{key} = {value!r}: expected a finite number")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.value(key, False)
        if not isinstance(value, bool):
            raise ModelError(f"{self.prefix}{key} = {value!r}: expected true or false")
        return value

    def vocabulary(self) -> int:
        """How many tokens the file says that there are."""
        tokens = self.fields.get("tokenizer.ggml.tokens")
        return self.count("vocab_size", len(tokens) if isinstance(tokens, list) else 0)

    def text(self, key: str, default: str) -> str:
        value = self.value(key, default)
        if not isinstance(value, str):
            raise ModelError(f"{self.prefix}{key} = {value!r}: expected text")
        return value
