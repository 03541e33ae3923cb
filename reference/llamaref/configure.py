"""The configuration of a model, from the metadata of its file: what all architectures read, and what its own adds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from llamaref.config import Config, Rope, Traits
from llamaref.errors import ModelError
from llamaref.metadata import Reader, refuse_unknown
from llamaref.models import ARCHITECTURES


def read_config(fields: Mapping[str, Any]) -> Config:
    """Read the metadata of a GGUF file of an architecture that is known; missing keys take llama.cpp's defaults.

    Raises ModelError naming a required key that is missing, a value of the wrong kind, or a key
    that changes the computation and is not implemented.
    """
    architecture = fields.get("general.architecture")
    if not isinstance(architecture, str):
        raise ModelError("general.architecture is missing: this GGUF file does not say what model it holds")
    module = ARCHITECTURES[architecture]
    traits: Traits = module.TRAITS
    refuse_unknown(architecture, traits, fields)
    read = Reader(architecture, fields)
    config = _read_shared(read, traits)
    if hasattr(module, "configure"):
        config = module.configure(config, read)
    _check(config)
    if any(config.windows):
        _check_twins(config, read)
    return config


def _read_shared(read: Reader, traits: Traits) -> Config:
    """What every architecture reads, and reads alike."""
    n_embd = read.count("embedding_length")
    n_head = read.count("attention.head_count", None if traits.has("ATTENTION") else 1)
    head_k = read.count("attention.key_length", n_embd // n_head)
    if not head_k:
        raise ModelError(f"{read.architecture}: {n_head} heads are more than the {n_embd} values of embedding_length")
    n_expert = read.count("expert_count", 0)
    norm_eps = read.number("attention.layer_norm_epsilon", 0.0)
    rope, windows = _rope(read, traits, head_k), _windows(read, traits)
    return Config(
        architecture=read.architecture,
        traits=traits,
        n_layer=read.count("block_count"),
        n_embd=n_embd,
        n_head=n_head,
        n_head_kv=read.count("attention.head_count_kv", n_head),
        head_k=head_k,
        head_v=read.count("attention.value_length", n_embd // n_head),
        n_ctx_train=read.count("context_length"),
        rms_eps=read.number("attention.layer_norm_rms_epsilon", 0.0 if norm_eps else None),
        rope=rope,
        norm_eps=norm_eps,
        n_expert=n_expert,
        n_expert_used=read.count("expert_used_count", None if n_expert else 0),
        attention_scale=1.0 / math.sqrt(head_k),
        windows=windows,
        ropes=(rope,) * len(windows),
    )


def _rope(read: Reader, traits: Traits, head_k: int) -> Rope:
    """RoPE settings (llama.cpp, llama_model_base::load_hparams and the llama_context constructor)."""
    kind = read.text("rope.scaling.type", "linear")
    if kind == "longrope" and traits.long_rope:
        kind = "linear"  # the factors come on top
    if kind not in ("none", "linear", "yarn"):
        raise ModelError(f"{read.prefix}rope.scaling.type = {kind!r}: the engine knows none, linear and yarn")
    factor = read.number("rope.scaling.factor", 0.0) or read.number("rope.scale_linear", 0.0) or 1.0
    n_ctx = read.count("context_length")
    return Rope(
        n_rot=read.count("rope.dimension_count", head_k),
        base=read.number("rope.freq_base", 10000.0),
        factor=1.0 if kind == "none" else factor,
        yarn=kind == "yarn",
        attn_factor=read.number("rope.scaling.attn_factor", 1.0),
        n_ctx_orig=read.count("rope.scaling.original_context_length", n_ctx) or n_ctx,
    )


def _windows(read: Reader, traits: Traits) -> tuple[int, ...]:
    """Every layer's window (llama.cpp, load_swa_pattern and set_swa_pattern)."""
    n_layer, window = read.count("block_count"), 0
    if traits.windows is not None:
        window = read.count("attention.sliding_window", traits.windows.length)
    if traits.windows is None or not window:
        return (0,) * n_layer
    pattern = read.fields.get(f"{read.prefix}attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        period = traits.windows.period if pattern is None else read.count("attention.sliding_window_pattern", 0)
        pattern = [not period or i % period < period - 1 for i in range(n_layer)]
    if len(pattern) < n_layer or any(flag not in (0, 1) for flag in pattern):
        raise ModelError(f"{read.prefix}attention.sliding_window_pattern: expected a flag for each of {n_layer} layers")
    return tuple(window if flag else 0 for flag in pattern[:n_layer])


def _check(config: Config) -> None:
    c = config
    rules = [
        (c.n_layer > 0, f"block_count = {c.n_layer}: must be at least 1"),
        (c.n_head_kv > 0, f"head_count_kv = {c.n_head_kv}: must be at least 1"),
        (c.n_head % max(c.n_head_kv, 1) == 0, f"{c.n_head} heads cannot share {c.n_head_kv} KV heads evenly"),
        *((r.base > 1, f"rope.freq_base = {r.base}: must be greater than 1") for r in (c.rope, *c.ropes) if r),
        (c.rope.factor > 0, f"rope.scaling.factor = {c.rope.factor}: must be positive"),
        (0 < c.rope.n_rot <= c.head_k, f"rope.dimension_count = {c.rope.n_rot}: must be 1 to {c.head_k} (key_length)"),
        (c.rope.n_rot % 2 == 0, f"rope.dimension_count = {c.rope.n_rot}: must be even"),
        (c.n_expert_used <= c.n_expert, f"expert_used_count = {c.n_expert_used}: there are {c.n_expert} experts"),
        (c.logit_scale != 0, "logit_scale = 0: logits are divided by it"),
        (c.rms_eps >= 0, f"layer_norm_rms_epsilon = {c.rms_eps}: must not be negative"),
    ]
    for holds, message in rules:
        if not holds:
            raise ModelError(f"{c.architecture}: {message}")


def _check_twins(c: Config, read: Reader) -> None:
    """Layers with a window have heads of the same sizes."""
    sizes = {"attention.key_length": c.head_k, "attention.value_length": c.head_v, "rope.dimension_count": c.rope.n_rot}
    for key, size in sizes.items():
        if read.count(f"{key}_swa", size) != size:
            raise ModelError(f"{read.prefix}{key}_swa: the engine implements one {key} for all layers")
