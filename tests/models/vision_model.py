"""What sees for a text model (an mmproj file), of random weights, as llama.cpp's tools/mtmd/clip.cpp reads it."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np

from models.diffusion_model import affine

STATE, HEADS, LAYERS, WIDE, PATCH, IMAGE = 64, 2, 2, 128, 14, 56  # a picture of 4 x 4 patches


def write_vision(path: Path, projector: str, embd: int, seed: int = 1) -> Path:
    """Write one with matrices in F16. ``projector``: how it gives a text model of this width what it has seen."""
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", projector)
    writer.add_bool("clip.use_gelu", True)
    for key, value in {
        "image_size": IMAGE, "patch_size": PATCH, "embedding_length": STATE, "feed_forward_length": WIDE,
        "block_count": LAYERS, "projection_dim": embd, "attention.head_count": HEADS, "projector.scale_factor": 2,
    }.items():  # fmt: skip
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    for key in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{key}", [0.5, 0.5, 0.5])
    for name, shape in tensors(projector, embd):
        is_norm = "norm" in name or ".ln" in name or "_ln." in name
        middle, scale = (1.0, 0.3) if is_norm and name.endswith("weight") else (0.0, np.prod(shape[1:]) ** -0.5)
        is_plain = len(shape) < 2 or "position" in name
        values = random.normal(middle, 0.3 if is_plain else scale, shape)
        writer.add_tensor(name, values.astype(np.float32 if is_plain else np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors(projector: str, embd: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of an encoder and of a projector (models/siglip.cpp, models/llava.cpp)."""
    yield "v.patch_embd.weight", (STATE, 3, PATCH, PATCH)
    yield "v.patch_embd.bias", (STATE,)
    yield "v.position_embd.weight", ((IMAGE // PATCH) ** 2, STATE)
    for block in (f"v.blk.{layer}" for layer in range(LAYERS)):
        for word in ("attn_q", "attn_k", "attn_v", "attn_out"):
            yield from affine(f"{block}.{word}", STATE, STATE)
        yield from affine(f"{block}.ffn_up", WIDE, STATE)
        yield from affine(f"{block}.ffn_down", STATE, WIDE)
        for word in ("ln1", "ln2"):
            yield from affine(f"{block}.{word}", STATE)
    yield from affine("v.post_ln", STATE)
    yield from PROJECTORS[projector](embd)


def _mlp(embd: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from affine("mm.0", embd, STATE)
    yield from affine("mm.2", embd, embd)


def _gemma3(embd: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "mm.input_projection.weight", (STATE, embd)
    yield "mm.soft_emb_norm.weight", (STATE,)


PROJECTORS = {"mlp": _mlp, "gemma3": _gemma3}


def write_picture(path: Path, side: int = IMAGE, seed: int = 0) -> Path:
    """A square PNG of noise."""
    rows = np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)
    lines = b"".join(b"\0" + row.tobytes() for row in rows)
    parts = {b"IHDR": struct.pack(">2I5B", side, side, 8, 2, 0, 0, 0), b"IDAT": zlib.compress(lines), b"IEND": b""}
    made = [struct.pack(">I", len(data)) + word + data + struct.pack(">I", zlib.crc32(word + data))
            for word, data in parts.items()]  # fmt: skip
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(made))
    return path
