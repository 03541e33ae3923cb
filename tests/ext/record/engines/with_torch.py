"""Llama in PyTorch, modules: python with_torch.py model.bin 1,17,5 [bfloat16]."""

import struct
import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Args:
    dim: int
    hidden: int
    n_layers: int
    n_heads: int
    n_kv: int
    vocab: int
    seq_len: int


def freqs_cis(dim, end, theta=10000.0):
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2).float() / dim))
    angles = torch.outer(torch.arange(end).float(), freqs)
    return torch.polar(torch.ones_like(angles), angles)


def apply_rotary(x, cis):
    z = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(z * cis[None, :, None]).flatten(3).type_as(x)


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        f = x.float()
        return (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


class Attention(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.h, self.kv, self.d = a.n_heads, a.n_kv, a.dim // a.n_heads
        self.wq = nn.Linear(a.dim, a.dim, bias=False)
        self.wk = nn.Linear(a.dim, self.kv * self.d, bias=False)
        self.wv = nn.Linear(a.dim, self.kv * self.d, bias=False)
        self.wo = nn.Linear(a.dim, a.dim, bias=False)

    def forward(self, x, cis):
        b, t, _ = x.shape
        q = self.wq(x).view(b, t, self.h, self.d)
        k = self.wk(x).view(b, t, self.kv, self.d)
        v = self.wv(x).view(b, t, self.kv, self.d)
        q, k = apply_rotary(q, cis), apply_rotary(k, cis)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        k = k.repeat_interleave(self.h // self.kv, 1)
        v = v.repeat_interleave(self.h // self.kv, 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(b, t, -1))


class FeedForward(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.w1 = nn.Linear(a.dim, a.hidden, bias=False)
        self.w2 = nn.Linear(a.hidden, a.dim, bias=False)
        self.w3 = nn.Linear(a.dim, a.hidden, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.attention, self.feed_forward = Attention(a), FeedForward(a)
        self.attention_norm, self.ffn_norm = RMSNorm(a.dim), RMSNorm(a.dim)

    def forward(self, x, cis):
        h = x + self.attention(self.attention_norm(x), cis)
        return h + self.feed_forward(self.ffn_norm(h))


class Transformer(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.tok = nn.Embedding(a.vocab, a.dim)
        self.layers = nn.ModuleList([Block(a) for _ in range(a.n_layers)])
        self.norm, self.output = RMSNorm(a.dim), nn.Linear(a.dim, a.vocab, bias=False)

    def forward(self, tokens, cis):
        h = self.tok(tokens)
        for layer in self.layers:
            h = layer(h, cis)
        return self.output(self.norm(h))


def load(path):
    with open(path, "rb") as f:
        args = Args(*struct.unpack("7i", f.read(28)))
        flat = torch.frombuffer(bytearray(f.read()), dtype=torch.float32)
    model, at = Transformer(args), 0

    def fill(*parameters):
        nonlocal at
        for p in parameters:
            p.data = flat[at : at + p.numel()].reshape(p.shape).clone()
            at += p.numel()

    layers = model.layers
    fill(model.tok.weight, *(y.attention_norm.weight for y in layers))
    for name in ("wq", "wk", "wv", "wo"):
        fill(*(getattr(y.attention, name).weight for y in layers))
    fill(*(y.ffn_norm.weight for y in layers))
    for name in ("w1", "w2", "w3"):
        fill(*(getattr(y.feed_forward, name).weight for y in layers))
    fill(model.norm.weight, model.output.weight)
    return model, args


if __name__ == "__main__":
    model, args = load(sys.argv[1])
    model = model.to(getattr(torch, sys.argv[3] if len(sys.argv) > 3 else "float32")).eval()
    tokens = torch.tensor([[int(t) for t in sys.argv[2].split(",")]])
    with torch.inference_mode():
        logits = model(tokens, freqs_cis(args.dim // args.n_heads, tokens.shape[1]))
    print(int(logits[0, -1].argmax()))
