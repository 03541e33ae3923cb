"""Frozen hyper-parameters of one model, read once from GGUF metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llamaref.errors import ModelError
from llamaref.metadata import refuse_unknown

__all__ = ["Config", "ModelError", "Rope", "Ssm"]


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: n_rot rotated values a head, base, and how positions are stretched.

    ``factor`` divides positions (1: none); with ``yarn`` only the slow frequencies are divided.
    """

    n_rot: int
    base: float
    factor: float = 1.0
    yarn: bool = False
    attn_factor: float = 1.0
    n_ctx_orig: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    log_mul: float = 0.0  # YaRN's attention temperature, where scores have it instead of the angles


@dataclass(frozen=True)
class Ssm:
    """A state space model's sizes; names are llama.cpp's."""

    d_conv: int = 0  # tokens that the convolution spans
    d_inner: int = 0
    d_state: int = 0
    n_head: int = 0
    n_group: int = 0

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: x, and B and C of every group."""
        return self.d_inner + 2 * self.n_group * self.d_state


@dataclass(frozen=True)
class Config:
    """Sizes and constants of one model; names are llama.cpp's."""

    architecture: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_k: int
    head_v: int
    n_ctx_train: int
    rms_eps: float
    rope: Rope
    ssm: Ssm = Ssm()
    norm_eps: float = 0.0  # of LayerNorm, in architectures that have it
    n_expert: int = 0
    n_expert_used: int = 0
    n_layer_dense_lead: int = 0  # layers at the beginning that have no experts
    n_expert_groups: int = 0
    n_group_used: int = 0
    expert_weights_norm: bool = False  # whether the chosen experts' weights are made to sum to one
    expert_weights_scale: float = 1.0
    expert_sigmoid: bool = False  # the router's probabilities are sigmoids, not a softmax
    n_lora_kv: int = 0  # values of K and V that latent attention keeps a token, without those of RoPE
    n_lora_q: int = 0
    head_k_mla: int = 0  # a head's Q and K, and V, unfolded
    head_v_mla: int = 0
    absorbed: bool = False  # latent attention keeps one row a token, head_k wide
    n_swa: int = 0  # keys that a query sees in the layers of ``swa_layers``; 0: all
    swa_layers: tuple[bool, ...] = ()

    def window(self, layer: int) -> int:
        """How many keys a query of this layer sees; 0: all that are not after it."""
        return self.n_swa if self.swa_layers and self.swa_layers[layer] else 0

    @property
    def n_nope(self) -> int:
        """A head's values that RoPE leaves alone, in latent attention."""
        return self.head_k_mla - self.rope.n_rot

    @classmethod
    def from_metadata(cls, fields: Mapping[str, Any]) -> Config:
        """Read the metadata of a GGUF file; missing keys take llama.cpp's defaults.

        Raises ModelError naming a required key that is missing, a value of the wrong kind, or a key
        that changes the computation and is not implemented.
        """
        architecture = fields.get("general.architecture")
        if not isinstance(architecture, str):
            raise ModelError("general.architecture is missing: this GGUF file does not say what model it holds")
        refuse_unknown(architecture, fields)
        read = _Reader(architecture, fields)
        n_embd, n_head = (
            read.count("embedding_length"),
            read.count("attention.head_count", 1 if architecture in RECURRENT else None),
        )
        head_k = read.count("attention.key_length", n_embd // n_head)
        n_expert = read.count("expert_count", 0)
        norm_eps = read.number("attention.layer_norm_epsilon", 0.0)
        config = cls(
            architecture=architecture,
            n_layer=read.count("block_count"),
            n_embd=n_embd,
            n_head=n_head,
            n_head_kv=read.count("attention.head_count_kv", n_head),
            head_k=head_k,
            head_v=read.count("attention.value_length", n_embd // n_head),
            n_ctx_train=read.count("context_length"),
            rms_eps=read.number("attention.layer_norm_rms_epsilon", 0.0 if norm_eps else None),
            rope=_rope(read, head_k),
            norm_eps=norm_eps,
            n_expert=n_expert,
            n_expert_used=read.count("expert_used_count", None if n_expert else 0),
            **_windows(read),
            **_latent(read),
            ssm=_ssm(read),
        )
        _check(config)
        return config


WINDOWS = {"gpt-oss": 2}  # architectures with windows -> the period: its last layer sees all keys


def _windows(read: _Reader) -> dict[str, Any]:
    """Which layers have a sliding window: a flag a layer, or the period (llama.cpp, set_swa_pattern)."""
    if read.architecture not in WINDOWS:
        return {}
    n_layer, key = read.count("block_count"), "attention.sliding_window_pattern"
    pattern = read.fields.get(read.prefix + key, WINDOWS[read.architecture])
    if not isinstance(pattern, list):
        pattern = [pattern == 0 or i % pattern < pattern - 1 for i in range(n_layer)]
    if len(pattern) < n_layer:
        raise ModelError(f"{read.prefix}{key} has {len(pattern)} values for {n_layer} layers")
    for own, other in (("rope.freq_base_swa", "rope.freq_base"), ("rope.dimension_count_swa", "rope.dimension_count")):
        if read.value(own, 0) not in (0, read.value(other, 0)):
            raise ModelError(f"{read.prefix}{own} = {read.value(own, 0)}: the engine has one RoPE for all layers")
    return {"n_swa": read.count("attention.sliding_window"), "swa_layers": tuple(map(bool, pattern[:n_layer]))}


GATING = {0: False, 1: False, 2: True}  # expert_gating_func -> whether it is a sigmoid; 0: not stated


def _latent(read: _Reader) -> dict[str, Any]:
    """Latent attention and the experts beside it (llama.cpp, src/models/deepseek2.cpp)."""
    if read.architecture != "deepseek2":
        return {}
    gating = read.count("expert_gating_func", 0)
    if gating not in GATING:
        raise ModelError(f"{read.prefix}expert_gating_func = {gating}: the engine knows 1 (softmax) and 2 (sigmoid)")
    k, v = read.count("attention.key_length_mla", 0), read.count("attention.value_length_mla", 0)
    return {
        "n_layer_dense_lead": read.count("leading_dense_block_count", 0),
        "n_expert_groups": read.count("expert_group_count", 0),
        "n_group_used": read.count("expert_group_used_count", 0),
        "expert_weights_norm": bool(read.value("expert_weights_norm", False)),
        "expert_weights_scale": read.number("expert_weights_scale", 0.0) or 1.0,
        "expert_sigmoid": GATING[gating],
        "n_lora_kv": read.count("attention.kv_lora_rank"),
        "n_lora_q": read.count("attention.q_lora_rank", 0),
        "head_k_mla": k or read.count("attention.key_length"),
        "head_v_mla": v or read.count("attention.value_length"),
        "absorbed": bool(k and v),
    }


RECURRENT = ("mamba2",)  # architectures without attention: heads are those of the scan


def _ssm(read: _Reader) -> Ssm:
    if read.architecture not in RECURRENT:
        return Ssm()
    ssm = Ssm(
        d_conv=read.count("ssm.conv_kernel"),
        d_inner=read.count("ssm.inner_size"),
        d_state=read.count("ssm.state_size"),
        n_head=read.count("ssm.time_step_rank"),
        n_group=read.count("ssm.group_count"),
    )
    if ssm.d_inner % ssm.n_head or ssm.d_inner % ssm.n_group or ssm.n_head % ssm.n_group:
        raise ModelError(f"{read.prefix}ssm: {ssm.d_inner} channels, {ssm.n_head} heads, {ssm.n_group} groups: uneven")
    return ssm


LONGROPE = ("phi3",)  # architectures that read rope_factors_long and rope_factors_short


def _rope(read: _Reader, head_k: int) -> Rope:
    """RoPE settings (llama.cpp, llama_model_base::load_hparams and the llama_context constructor)."""
    kind = read.text("rope.scaling.type", "linear")
    kind = "linear" if kind == "longrope" and read.architecture in LONGROPE else kind  # the factors come on top
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
        log_mul=10 * read.number("rope.scaling.yarn_log_multiplier", 0.0) if read.architecture == "deepseek2" else 0.0,
    )


def _check(config: Config) -> None:
    c = config
    rules = [
        (c.n_layer > 0, f"block_count = {c.n_layer}: must be at least 1"),
        (c.n_head_kv > 0, f"head_count_kv = {c.n_head_kv}: must be at least 1"),
        (c.n_head % max(c.n_head_kv, 1) == 0, f"{c.n_head} heads cannot share {c.n_head_kv} KV heads evenly"),
        (c.rope.base > 1, f"rope.freq_base = {c.rope.base}: must be greater than 1"),
        (c.rope.factor > 0, f"rope.scaling.factor = {c.rope.factor}: must be positive"),
        (0 < c.rope.n_rot <= c.head_k, f"rope.dimension_count = {c.rope.n_rot}: must be 1 to {c.head_k} (key_length)"),
        (c.rope.n_rot % 2 == 0, f"rope.dimension_count = {c.rope.n_rot}: must be even"),
        (c.n_expert_used <= c.n_expert, f"expert_used_count = {c.n_expert_used}: there are {c.n_expert} experts"),
        (c.rms_eps >= 0, f"layer_norm_rms_epsilon = {c.rms_eps}: must not be negative"),
    ]
    for holds, message in rules:
        if not holds:
            raise ModelError(f"{c.architecture}: {message}")


class _Reader:
    """Typed access to the keys of one architecture."""

    def __init__(self, architecture: str, fields: Mapping[str, Any]) -> None:
        self.architecture = architecture
        self.prefix = f"{architecture}."
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

    def text(self, key: str, default: str) -> str:
        value = self.value(key, default)
        if not isinstance(value, str):
            raise ModelError(f"{self.prefix}{key} = {value!r}: expected text")
        return value
