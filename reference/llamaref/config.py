"""What an architecture is besides the maths of its layers, and the frozen hyper-parameters of one model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Windows:
    """Layers that see the last tokens alone, as far as the metadata does not say it.

    ``length`` in tokens (0: no layer does, None: the metadata must say); of every ``period`` layers the last sees all.
    """

    length: int | None
    period: int


@dataclass(frozen=True)
class Traits:
    """What all models of an architecture have in common.

    ``layers`` are words for what its layers have, which taps depend on (llamadiff/trace/taps.py); ``keys`` the
    metadata that its ``configure`` reads, or that changes nothing, besides everybody's (metadata.py).
    """

    layers: str
    norm: Literal["RMS_NORM", "NORM"] = "RMS_NORM"  # ggml's op
    qk_norm: Literal["head", "heads", "row"] = "head"  # its weight: one for all heads, one a head, or for a whole row
    rope_pairs: bool = False  # (2i, 2i+1), for which GGUF files permute the rows of Q and K; else halves (i, i + n/2)
    long_rope: bool = False  # whether rope_factors_long and rope_factors_short are read
    learned_positions: bool = False  # whether position_embd is added to the embedding
    scales_queries: bool = False  # by the attention scale, before scores are made; else the softmax scales those
    ffn_scales: bool = False  # whether llama.cpp's graph multiplies by ffn_*.scale where a file has it
    windows: Windows | None = None
    keys: str = ""

    def has(self, word: str) -> bool:
        """Whether its layers have something."""
        return word in self.layers.split()


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
    traits: Traits
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

    def with_local_rope(self, local: Rope) -> Config:
        """The same with another RoPE in the layers that have a window."""
        return replace(self, ropes=tuple(local if window else self.rope for window in self.windows))

    def with_rope(self, rope: Rope) -> Config:
        """The same with another RoPE in every layer."""
        return replace(self, rope=rope, ropes=(rope,) * self.n_layer)

    def without_rope(self) -> Config:
        """The same with no RoPE in any layer."""
        return replace(self, ropes=(None,) * self.n_layer)
