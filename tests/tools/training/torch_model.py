"""The shipped model: the maths of llama.cpp's src/models/llama.cpp, with RoPE on interleaved pairs."""

import math
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

# Every width that a matrix multiplies is a multiple of 256, the block of the K-quants.
N_VOCAB, N_CTX, N_LAYER, N_EMBD, N_FF, N_HEAD, N_HEAD_KV = 704, 512, 3, 256, 512, 4, 2
HEAD_DIM = N_EMBD // N_HEAD
RMS_EPS, ROPE_BASE = 1e-5, 10000.0

Weights = dict[str, Tensor]  # by GGUF tensor name; a matrix is [output, input]


def matrix_shapes() -> dict[str, tuple[int, int]]:
    """The [output, input] shape of each matrix, by GGUF name."""
    width_kv = N_HEAD_KV * HEAD_DIM
    block = {
        "attn_q": (N_EMBD, N_EMBD),
        "attn_k": (width_kv, N_EMBD),
        "attn_v": (width_kv, N_EMBD),
        "attn_output": (N_EMBD, N_EMBD),
        "ffn_gate": (N_FF, N_EMBD),
        "ffn_up": (N_FF, N_EMBD),
        "ffn_down": (N_EMBD, N_FF),
    }
    blocks = {f"blk.{i}.{name}.weight": shape for i in range(N_LAYER) for name, shape in block.items()}
    return {"token_embd.weight": (N_VOCAB, N_EMBD)} | blocks


def init_weights(seed: int) -> Weights:
    """Draws each matrix with a variance of 1 / input, and sets the norms to one."""
    rng = torch.Generator().manual_seed(seed)
    matrices = {
        name: torch.randn(shape, generator=rng) / math.sqrt(shape[1]) for name, shape in matrix_shapes().items()
    }
    norm_names = [f"blk.{i}.{name}_norm.weight" for i in range(N_LAYER) for name in ("attn", "ffn")]
    norms = {name: torch.ones(N_EMBD) for name in [*norm_names, "output_norm.weight"]}
    return {name: weight.requires_grad_() for name, weight in (matrices | norms).items()}


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Scales each row of x to a root mean square of one, then by the weight."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + RMS_EPS) * weight


@cache
def rope_angles() -> Tensor:
    """The angle of each position and pair: position * base^(-2 pair / head_dim), [token, pair]."""
    frequencies = ROPE_BASE ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    return torch.outer(torch.arange(N_CTX), frequencies)


def rope(x: Tensor) -> Tensor:
    """Rotates the pairs (0, 1), (2, 3), ... of each head by their angles; x is [batch, head, token, dim]."""
    angles = rope_angles()[: x.shape[-2]]
    cos, sin = angles.cos(), angles.sin()
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def split_heads(x: Tensor) -> Tensor:
    """[batch, token, head * dim] -> [batch, head, token, dim]"""
    return x.view(*x.shape[:-1], -1, HEAD_DIM).transpose(1, 2)


def attention(x: Tensor, weights: Weights, block: str) -> Tensor:
    """Causal attention with grouped queries."""
    q, k, v = (split_heads(x @ weights[f"{block}.attn_{name}.weight"].T) for name in "qkv")
    k, v = (heads.repeat_interleave(N_HEAD // N_HEAD_KV, 1) for heads in (k, v))
    mixed = scaled_dot_product_attention(rope(q), rope(k), v, is_causal=True)
    return mixed.transpose(1, 2).flatten(-2) @ weights[f"{block}.attn_output.weight"].T


def feed_forward(x: Tensor, weights: Weights, block: str) -> Tensor:
    """SwiGLU."""
    gate, up = (x @ weights[f"{block}.ffn_{name}.weight"].T for name in ("gate", "up"))
    return (silu(gate) * up) @ weights[f"{block}.ffn_down.weight"].T


def forward(tokens: Tensor, weights: Weights) -> Tensor:
    """[batch, token] -> logits [batch, token, vocabulary]; the output matrix is the embedding."""
    x = weights["token_embd.weight"][tokens]
    for i in range(N_LAYER):
        x = x + attention(rms_norm(x, weights[f"blk.{i}.attn_norm.weight"]), weights, f"blk.{i}")
        x = x + feed_forward(rms_norm(x, weights[f"blk.{i}.ffn_norm.weight"]), weights, f"blk.{i}")
    return rms_norm(x, weights["output_norm.weight"]) @ weights["token_embd.weight"].T
