"""Frozen hyper-parameters of one model, read once from GGUF metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from llamaref.errors import ModelError
from llamaref.metadata import Reader, implemented, refuse_unknown

__all__ = ["Config", "Latent", "ModelError", "Rope", "Router", "Ssm"]


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
class Latent:
    """Sizes of latent attention: of what a token keeps of K and V, of Q's bottleneck, of a head."""

    n_lora_kv: int = 0
    n_lora_q: int = 0
    head_k: int = 0
    head_v: int = 0
    n_nope: int = 0  # values of a head's Q and K that RoPE leaves alone


@dataclass(frozen=True)
class Router:
    """How experts are chosen and weighted: probabilities by sigmoid or softmax; of the chosen, made to sum to one."""

    sigmoid: bool = False
    normalized: bool = True
    scale: float = 1.0
    n_group: int = 0  # experts are chosen from the best ``n_group_used`` of so many groups (0, 1: from all)
    n_group_used: int = 0


@dataclass(frozen=True)
class Ssm:
    """Sizes of a state space model; names are llama.cpp's."""

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
    """Sizes and constants of one model; names are llama.cpp's.

    By layer: ``windows``, how many positions attention reaches back, its own included (0: all), and ``ropes``.
    """

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
    norm_eps: float = 0.0  # of LayerNorm, in architectures that have it
    n_expert: int = 0
    n_expert_used: int = 0
    attention_scale: float = 1.0  # the scores are multiplied by it, in architectures that say so; so are:
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # what a branch adds
    logit_scale: float = 1.0  # what logits are divided by
    attention_cap: float = 0.0  # of the scores, 0: none
    logit_cap: float = 0.0
    windows: tuple[int, ...] = ()
    ropes: tuple[Rope | None, ...] = ()
    ssm: Ssm = Ssm()
    latent: Latent = Latent()
    router: Router = Router()

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
        read = Reader(architecture, fields)
        n_embd = read.count("embedding_length")
        n_head = read.count("attention.head_count", 1 if architecture in _RECURRENT else None)
        head_k = read.count("attention.key_length", n_embd // n_head)
        if not head_k:
            raise ModelError(f"{architecture}: {n_head} heads are more than the {n_embd} values of embedding_length")
        n_expert = read.count("expert_count", 0)
        norm_eps = read.number("attention.layer_norm_epsilon", 0.0)
        rope, windows = _rope(read, head_k), _windows(read)
        attention_cap, logit_cap = _CAPS.get(architecture, (0.0, 0.0))
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
            rope=rope,
            norm_eps=norm_eps,
            n_expert=n_expert,
            n_expert_used=read.count("expert_used_count", None if n_expert else 0),
            attention_scale=_attention_scale(read, n_embd, n_head, head_k, rope),
            embedding_scale=_embedding_scale(read, n_embd),
            residual_scale=read.own("residual_scale", read.number, 0.0) or 1.0,
            logit_scale=read.own("logit_scale", read.number, 1.0),
            attention_cap=read.own("attn_logit_softcapping", read.number, attention_cap),
            logit_cap=read.own("final_logit_softcapping", read.number, logit_cap),
            windows=windows,
            ropes=_ropes(read, rope, windows),
            ssm=_ssm(read),
            latent=_latent(read, rope),
            router=_router(read, n_expert),
        )
        _check(config)
        if any(windows):
            _check_twins(config, read)
        return config


# Caps of scores and logits where the file does not say (llama-hparams.h).
_CAPS = {"gemma2": (50.0, 30.0)}

# Layers of the 27B models, which scale scores by other heads than they have.
_LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}


def _attention_scale(read: Reader, n_embd: int, n_head: int, head_k: int, rope: Rope) -> float:
    """What attention's scores are multiplied by (src/models/*.cpp)."""
    if read.architecture in _LATENT:
        return _magnitude(rope) ** 2 / math.sqrt(read.count("attention.key_length_mla", head_k))
    stated = read.own("attention.scale", read.number, 0.0)
    if read.architecture == "granite":
        return stated or 1.0 / math.sqrt(head_k)
    largest = _LARGEST_GEMMA.get(read.architecture) == read.count("block_count")
    scale = 1.0 / math.sqrt(n_embd // n_head if largest else head_k)
    if stated and not math.isclose(stated, scale, rel_tol=1e-6):
        raise ModelError(f"{read.prefix}attention.scale = {stated}: this architecture's is {scale}, which is not read")
    return scale


def _magnitude(rope: Rope) -> float:
    """YaRN's attention temperature, which latent attention has in its scores (llama.cpp, discussion 7416)."""
    stretch = 0.1 * math.log(rope.factor) if rope.factor > 0 else 0.0
    plain = 1.0 if rope.yarn and (rope.log_mul or rope.factor <= 1) else 1.0 + stretch
    return rope.attn_factor * plain * (1.0 + rope.log_mul * stretch)


def _embedding_scale(read: Reader, n_embd: int) -> float:
    """What the token embeddings are multiplied by."""
    if read.architecture.startswith("gemma"):
        return math.sqrt(n_embd)
    return read.own("embedding_scale", read.number, 0.0) or 1.0


_LONGROPE = ("phi3",)  # architectures that read rope_factors_long and rope_factors_short


def _rope(read: Reader, head_k: int) -> Rope:
    """RoPE settings (llama.cpp, llama_model_base::load_hparams and the llama_context constructor)."""
    kind = read.text("rope.scaling.type", "linear")
    if kind == "longrope" and read.architecture in _LONGROPE:
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
        log_mul=10 * read.own("rope.scaling.yarn_log_multiplier", read.number, 0.0),
    )


# The window where the file does not say (None: it must), and every how manieth layer sees all positions
# (src/models/*.cpp).
_WINDOWS = {"gemma2": (4096, 2), "gemma3": (0, 6), "gpt-oss": (None, 2), "olmo2": (0, 4)}


def _windows(read: Reader) -> tuple[int, ...]:
    """Every layer's window (llama.cpp, load_swa_pattern and set_swa_pattern)."""
    n_layer = read.count("block_count")
    window, period = _WINDOWS.get(read.architecture, (0, 0))
    if "attention.sliding_window" in implemented(read.architecture):
        window = read.count("attention.sliding_window", window)
    if not window or read.architecture == "phi3":
        return (0,) * n_layer
    pattern = read.fields.get(f"{read.prefix}attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        period = period if pattern is None else read.count("attention.sliding_window_pattern", 0)
        pattern = [not period or i % period < period - 1 for i in range(n_layer)]
    if len(pattern) < n_layer or any(flag not in (0, 1) for flag in pattern):
        raise ModelError(f"{read.prefix}attention.sliding_window_pattern: expected a flag for each of {n_layer} layers")
    return tuple(window if flag else 0 for flag in pattern[:n_layer])


def _ropes(read: Reader, rope: Rope, windows: tuple[int, ...]) -> tuple[Rope | None, ...]:
    """Every layer's RoPE: some layers have none, and those with a window may have one of their own."""
    if read.architecture in ("gpt2", *_RECURRENT):
        return (None,) * len(windows)
    if read.architecture == "smollm3":  # llama.cpp, n_no_rope_layer_step
        return tuple(None if i % 4 == 3 else rope for i in range(len(windows)))
    if read.architecture == "granite" and read.value("rope.scaling.finetuned", True) is False:
        return (None,) * len(windows)
    plain = replace(rope, factor=1.0, yarn=False)
    local = {
        "gemma3": replace(plain, base=read.own("rope.freq_base_swa", read.number, 10000.0)),
        "gemma2": replace(rope, base=read.own("rope.freq_base_swa", read.number, rope.base)),
        "gpt-oss": replace(rope, base=read.own("rope.freq_base_swa", read.number, rope.base)),
        "olmo2": replace(plain, attn_factor=1.0),
    }.get(read.architecture, rope)
    return tuple(local if window else rope for window in windows)


_RECURRENT = ("mamba2",)  # architectures without attention


def _ssm(read: Reader) -> Ssm:
    """Sizes of the scan (llama.cpp, src/models/mamba2.cpp)."""
    if read.architecture not in _RECURRENT:
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


_LATENT = ("deepseek2",)  # architectures with latent attention


def _latent(read: Reader, rope: Rope) -> Latent:
    """Sizes of latent attention; key_length and value_length are a cache row's where those of MLA are given."""
    if read.architecture not in _LATENT:
        return Latent()
    k, v = read.count("attention.key_length_mla", 0), read.count("attention.value_length_mla", 0)
    n_head, n_head_kv = read.count("attention.head_count"), read.count("attention.head_count_kv")
    if n_head_kv != (1 if k and v else n_head):
        raise ModelError(
            f"{read.prefix}attention.head_count_kv = {n_head_kv}: latent attention has 1, or {n_head} each"
        )
    lora_kv, lora_q = read.count("attention.kv_lora_rank"), read.count("attention.q_lora_rank", 0)
    row = read.count("attention.key_length"), read.count("attention.value_length")
    if k and v and row != (lora_kv + rope.n_rot, lora_kv):
        raise ModelError(
            f"{read.prefix}attention.key_length, value_length = {row}: a cache row has {lora_kv} values and RoPE's"
        )
    k, v = (k, v) if k and v else row
    if k <= rope.n_rot:
        raise ModelError(
            f"{read.prefix}rope.dimension_count = {rope.n_rot}: must be less than the {k} values of a head"
        )
    return Latent(lora_kv, lora_q, head_k=k, head_v=v, n_nope=k - rope.n_rot)


def _router(read: Reader, n_expert: int) -> Router:
    """How experts are chosen (llama.cpp, src/models/deepseek2.cpp and build_moe_ffn)."""
    if read.architecture not in _LATENT:
        return Router()
    gating = read.count("expert_gating_func", 0)
    if not gating and read.count("block_count") in (47, 48) and read.vocabulary() == 154880:  # GLM 4.7 Flash
        gating = 2
    if gating > 2:
        raise ModelError(f"{read.prefix}expert_gating_func = {gating}: the engine knows 1 (softmax) and 2 (sigmoid)")
    router = Router(
        sigmoid=gating == 2,
        normalized=read.flag("expert_weights_norm"),
        scale=read.number("expert_weights_scale", 0.0) or 1.0,
        n_group=read.count("expert_group_count", 0),
        n_group_used=read.count("expert_group_used_count", 0),
    )
    fits = router.n_group <= 1 or (0 < router.n_group_used < router.n_group and n_expert % router.n_group == 0)
    if not fits or (router.n_group > 1 and n_expert < 2 * router.n_group):
        said = f"{router.n_group_used} of {router.n_group} groups of {n_expert} experts"
        raise ModelError(f"{read.prefix}expert_group_count: experts cannot be chosen from {said}")
    return router


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
        (
            c.architecture not in _CAPS or min(c.attention_cap, c.logit_cap) > 0,
            "attn_logit_softcapping, final_logit_softcapping: caps of scores and logits must be positive",
        ),
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
