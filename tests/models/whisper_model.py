"""A Whisper of random weights, in the file format that whisper.cpp reads (its models/convert-pt-to-ggml.py)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

VOCABULARY, MEL, FREQUENCIES = 51864, 80, 201  # of English models; special tokens have numbers up to the first
STATE, HEADS, LAYERS, AUDIO, TEXT = 64, 2, 3, 1500, 448


def write_whisper(path: Path, state: int = STATE, heads: int = HEADS, layers: int = LAYERS, seed: int = 1) -> Path:
    """Write one, with matrices in F16."""
    random = np.random.default_rng(seed)
    with path.open("wb") as file:
        file.write(struct.pack("<I", 0x67676D6C))
        file.write(struct.pack("<11i", VOCABULARY, AUDIO, state, heads, layers, TEXT, state, heads, layers, MEL, 1))
        file.write(struct.pack("<2i", MEL, FREQUENCIES))
        file.write(np.abs(random.normal(0, 0.05, (MEL, FREQUENCIES))).astype("<f4").tobytes())
        file.write(struct.pack("<i", 300))
        for number in range(300):
            word = f" w{number}".encode() if number else b" "  # which it asks for
            file.write(struct.pack("<I", len(word)) + word)
        for name, shape in tensors(state, layers):
            is_norm, is_plain = name.endswith("ln.weight"), len(shape) < 2 or name.endswith(("embedding", ".bias"))
            middle, scale = (1.0, 0.3) if is_norm else (0.0, 0.3 / np.sqrt(shape[-1]))
            values = random.normal(middle, scale, shape)
            word = name.encode()
            file.write(struct.pack("<3i", len(shape), len(word), 0 if is_plain else 1))
            file.write(struct.pack(f"<{len(shape)}i", *reversed(shape)) + word)
            file.write(values.astype("<f4" if is_plain else "<f2").tobytes())
    return path


def tensors(state: int, layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes, as in the checkpoint."""
    yield "encoder.positional_embedding", (AUDIO, state)
    yield "encoder.conv1.weight", (state, MEL, 3)
    yield "encoder.conv1.bias", (state, 1)
    yield "encoder.conv2.weight", (state, state, 3)
    yield "encoder.conv2.bias", (state, 1)
    for layer in range(layers):
        yield from _block(f"encoder.blocks.{layer}", state, ("attn",))
    yield from _norm("encoder.ln_post", state)
    yield "decoder.positional_embedding", (TEXT, state)
    yield "decoder.token_embedding.weight", (VOCABULARY, state)
    for layer in range(layers):
        yield from _block(f"decoder.blocks.{layer}", state, ("attn", "cross_attn"))
    yield from _norm("decoder.ln", state)


def _block(name: str, state: int, attentions: tuple[str, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for attention in attentions:
        yield from _norm(f"{name}.{attention}_ln", state)
        for word in ("query", "key", "value", "out"):
            yield f"{name}.{attention}.{word}.weight", (state, state)
            if word != "key":
                yield f"{name}.{attention}.{word}.bias", (state,)
    yield from _norm(f"{name}.mlp_ln", state)
    for word, out, width in (("0", 4 * state, state), ("2", state, 4 * state)):
        yield f"{name}.mlp.{word}.weight", (out, width)
        yield f"{name}.mlp.{word}.bias", (out,)


def _norm(name: str, state: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (state,)
    yield f"{name}.bias", (state,)
