"""A small BERT file, and an engine of one in NumPy that records what it computes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np

Array = np.ndarray
EMBD, HEADS, FF, VOCAB, LAYERS, EPS = 64, 4, 96, 512, 2, 1e-12


def write_model(path: Path) -> None:
    """Random weights, in float16 where they are matrices."""
    rng = np.random.default_rng(3)
    writer = gguf.GGUFWriter(path, "bert")
    for name, value in {
        "block_count": LAYERS, "context_length": 64, "embedding_length": EMBD, "feed_forward_length": FF,
        "attention.head_count": HEADS, "vocab_size": VOCAB,
    }.items():  # fmt: skip
        writer.add_uint32(f"bert.{name}", value)
    writer.add_float32("bert.attention.layer_norm_epsilon", EPS)
    writer.add_bool("bert.attention.causal", False)
    writer.add_tokenizer_model("no_vocab")
    writer.add_token_type_count(2)
    matrices = {"token_embd": (VOCAB, EMBD), "position_embd": (64, EMBD), "token_types": (2, EMBD)}
    norms = ["token_embd_norm"]
    for layer in (f"blk.{i}." for i in range(LAYERS)):
        matrices |= {f"{layer}attn_{one}": (EMBD, EMBD) for one in ("q", "k", "v", "output")}
        matrices |= {f"{layer}ffn_up": (FF, EMBD), f"{layer}ffn_down": (EMBD, FF)}
        norms += [f"{layer}attn_output_norm", f"{layer}layer_output_norm"]
    for name, shape in matrices.items():
        kind = np.float32 if name in {"position_embd", "token_types"} else np.float16
        writer.add_tensor(f"{name}.weight", (2 * rng.standard_normal(shape) / np.sqrt(shape[1])).astype(kind))
    for name in norms:
        writer.add_tensor(f"{name}.weight", rng.uniform(0.5, 1.5, EMBD).astype(np.float32))
        writer.add_tensor(f"{name}.bias", (0.1 * rng.standard_normal(EMBD)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def run(path: Path, tokens: Sequence[int], first_position: int = 0) -> dict[str, Array]:
    """The taps of a run; ``first_position``: RoBERTa's is 2, and BERT's 0."""
    w = {each.name: gguf.quants.dequantize(each.data, each.tensor_type) for each in gguf.GGUFReader(path).tensors}

    def linear(x: Array, name: str) -> Array:
        return x @ w[f"{name}.weight"].T

    def norm(x: Array, name: str) -> Array:
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * w[f"{name}.weight"] + w[f"{name}.bias"]

    n, t = len(tokens), dict[str, Array]()
    positions = w["position_embd.weight"][first_position : first_position + n]
    t["embd"] = w["token_embd.weight"][list(tokens)]
    x = t["inp_norm-0"] = norm(t["embd"] + w["token_types.weight"][0] + positions, "token_embd_norm")
    for i in range(LAYERS):
        layer = f"blk.{i}."
        q, k, v = (linear(x, f"{layer}attn_{one}") for one in "qkv")
        t |= {f"Qcur_proj-{i}": q, f"Kcur_proj-{i}": k, f"Vcur_proj-{i}": v}
        q, k, v = (one.reshape(n, HEADS, -1) for one in (q, k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(EMBD // HEADS)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p = t[f"kq_soft_max-{i}"] = p / p.sum(-1, keepdims=True)
        y = t[f"kqv_out-{i}"] = np.einsum("hqk,khd->qhd", p, v).reshape(n, EMBD)
        y = t[f"attn_out-{i}"] = linear(y, f"{layer}attn_output")
        x = t[f"ffn_inp-{i}"] = norm(x + y, f"{layer}attn_output_norm")
        up = t[f"ffn_up-{i}"] = linear(x, f"{layer}ffn_up")
        up = up / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
        y = t[f"ffn_out-{i}"] = linear(up, f"{layer}ffn_down")
        x = norm(x + y, f"{layer}layer_output_norm")
    t["result_embd"] = x
    return t
