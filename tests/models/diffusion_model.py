"""A diffusion model (Flux) of random weights, as small as stable-diffusion.cpp lets one be: what reads the prompt
(CLIP-L, whose size it knows by itself), a transformer with a block of each kind, and what makes an image of a latent.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from models.gguf_file import finish

Shapes = Iterator[tuple[str, tuple[int, ...]]]
CLIP, CLIP_FF, CLIP_LAYERS, WORDS, POSITIONS = 768, 3072, 12, 49408, 77
STATE, HEAD, T5, PATCH, TIMES = 256, 128, 4096, 64, 256
CHANNELS, LATENT = (32, 64, 128, 128), 16
LARGEST = 1 << 20  # values that are drawn of one tensor; they are repeated over the rest


def write_diffusion(path: Path, seed: int = 1) -> Path:
    """Write one: the prompt's reader in Q4_0, the transformer in Q8_0, convolutions in F16."""
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "flux")
    for name, shape in (*_reader(), *_transformer(), *_decoder()):
        is_factor = name.endswith(".scale") or ("norm" in name and name.endswith("weight"))
        is_plain = len(shape) < 2
        scale = 0.1 if is_plain else np.prod(shape[1:]) ** -0.5
        drawn = random.normal(float(is_factor), scale, min(LARGEST, np.prod(shape)))
        values = np.resize(drawn.astype(np.float32), shape)
        if is_plain or len(shape) > 2 or "embedding" in name:
            writer.add_tensor(name, values.astype(np.float32 if is_plain else np.float16))
        else:
            kind = Type.Q4_0 if name.startswith("text_encoders") else Type.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    finish(writer)
    return path


def affine(name: str, *shape: int) -> Shapes:
    """A matrix and its bias."""
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[:1]


def _reader() -> Shapes:
    """Names as of the checkpoint (src/clip.hpp)."""
    model = "text_encoders.clip_l.transformer.text_model"
    yield f"{model}.embeddings.token_embedding.weight", (WORDS, CLIP)
    yield f"{model}.embeddings.position_embedding.weight", (POSITIONS, CLIP)
    for layer in (f"{model}.encoder.layers.{number}" for number in range(CLIP_LAYERS)):
        for word in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from affine(f"{layer}.self_attn.{word}", CLIP, CLIP)
        yield from affine(f"{layer}.mlp.fc1", CLIP_FF, CLIP)
        yield from affine(f"{layer}.mlp.fc2", CLIP, CLIP_FF)
        for word in ("layer_norm1", "layer_norm2"):
            yield from affine(f"{layer}.{word}", CLIP)
    yield from affine(f"{model}.final_layer_norm", CLIP)


def _transformer() -> Shapes:
    """src/flux.hpp: a block of two streams, and one of a single one."""
    model = "model.diffusion_model"
    yield from affine(f"{model}.img_in", STATE, PATCH)
    yield from affine(f"{model}.txt_in", STATE, T5)
    for name, size in (("time_in", TIMES), ("vector_in", CLIP)):
        yield from affine(f"{model}.{name}.in_layer", STATE, size)
        yield from affine(f"{model}.{name}.out_layer", STATE, STATE)
    for stream in (f"{model}.double_blocks.0.{name}" for name in ("img", "txt")):
        yield from affine(f"{stream}_mod.lin", 6 * STATE, STATE)
        yield from affine(f"{stream}_attn.qkv", 3 * STATE, STATE)
        yield from affine(f"{stream}_attn.proj", STATE, STATE)
        yield from _scales(f"{stream}_attn.norm")
        yield from affine(f"{stream}_mlp.0", 4 * STATE, STATE)
        yield from affine(f"{stream}_mlp.2", STATE, 4 * STATE)
    single = f"{model}.single_blocks.0"
    yield from affine(f"{single}.linear1", 7 * STATE, STATE)
    yield from affine(f"{single}.linear2", STATE, 5 * STATE)
    yield from affine(f"{single}.modulation.lin", 3 * STATE, STATE)
    yield from _scales(f"{single}.norm")
    yield from affine(f"{model}.final_layer.linear", PATCH, STATE)
    yield from affine(f"{model}.final_layer.adaLN_modulation.1", 2 * STATE, STATE)


def _scales(name: str) -> Shapes:
    yield f"{name}.query_norm.scale", (HEAD,)
    yield f"{name}.key_norm.scale", (HEAD,)


def _decoder() -> Shapes:
    """src/auto_encoder_kl.hpp, with a quarter of the usual channels."""
    model, width = "first_stage_model.decoder", CHANNELS[-1]
    yield from affine(f"{model}.conv_in", width, LATENT, 3, 3)
    for name in ("block_1", "block_2"):
        yield from _residual(f"{model}.mid.{name}", width, width)
    yield from affine(f"{model}.mid.attn_1.norm", width)
    for name in ("q", "k", "v", "proj_out"):
        yield from affine(f"{model}.mid.attn_1.{name}", width, width, 1, 1)
    for level, out in reversed([*enumerate(CHANNELS)]):
        for number in range(3):
            yield from _residual(f"{model}.up.{level}.block.{number}", width if number == 0 else out, out)
        width = out
        if level:
            yield from affine(f"{model}.up.{level}.upsample.conv", out, out, 3, 3)
    yield from affine(f"{model}.norm_out", width)
    yield from affine(f"{model}.conv_out", 3, width, 3, 3)


def _residual(name: str, into: int, out: int) -> Shapes:
    yield from affine(f"{name}.norm1", into)
    yield from affine(f"{name}.conv1", out, into, 3, 3)
    yield from affine(f"{name}.norm2", out)
    yield from affine(f"{name}.conv2", out, out, 3, 3)
    if into != out:
        yield from affine(f"{name}.nin_shortcut", out, into, 1, 1)
