"""A small reranker: the shipped model's weights as a Qwen3, with a classifier of two labels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from models.gguf_file import read_gguf, write_gguf

from llamadiff.llamacpp.shipped import shipped_model

LABELS = ["yes", "no"]


def write_reranker(path: Path, **more: object) -> Path:
    """``more``: metadata besides."""
    fields, tensors = read_gguf(shipped_model())
    width, heads, layers = (
        int(fields[f"llama.{key}"][0]) for key in ("embedding_length", "attention.head_count", "block_count")
    )
    named = {
        key.replace("llama.", "qwen3.", 1) if key.startswith("llama.") else key: each for key, each in fields.items()
    }
    sizes = {f"qwen3.attention.{side}_length": width // heads for side in ("key", "value")}
    for layer in range(layers):
        for side in "qk":
            tensors[f"blk.{layer}.attn_{side}_norm.weight"] = np.ones(width // heads, np.float32)
    tensors["cls.output.weight"] = np.random.default_rng(5).standard_normal((2, width)).astype(np.float32) / 16
    ranks = {"qwen3.pooling_type": 4, "qwen3.classifier.output_labels": LABELS, "tokenizer.ggml.add_eos_token": True}
    return write_gguf(path, {**named, **sizes, **ranks, **more}, tensors, "qwen3")
