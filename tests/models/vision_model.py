"""What sees or hears for a text model (an mmproj file), of random weights, as llama.cpp's clip.cpp reads it."""

from __future__ import annotations

import struct
import wave
import zlib
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np

from models.diffusion_model import affine
from models.gguf_file import finish

STATE, HEADS, LAYERS, WIDE, PATCH, IMAGE = 64, 2, 2, 128, 14, 56  # a picture of 4 x 4 patches
CLIP = {"mean": [0.48145466, 0.4578275, 0.40821073], "std": [0.26862954, 0.26130258, 0.27577711]}
MEL, STACKED = 80, 4  # of 1500 frames so many at a time


def write_vision(path: Path, projector: str, embd: int, seed: int = 1) -> Path:
    """Write one with matrices in F16. ``projector``: how it gives a text model of this width what it has seen."""
    writer = _begun(path, "vision", projector, embd)
    for key, value in {"image_size": IMAGE, "patch_size": PATCH, "projector.scale_factor": 2}.items():
        writer.add_uint32(f"clip.vision.{key}", value)
    for key in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{key}", [0.5, 0.5, 0.5])
    return _written(path, writer, tensors(projector, embd), seed)


def write_hearing(path: Path, embd: int, seed: int = 1) -> Path:
    """Write a Whisper's encoder with Ultravox's projector."""
    writer = _begun(path, "audio", "ultravox", embd)
    for key, value in {"num_mel_bins": MEL, "projector.stack_factor": STACKED}.items():
        writer.add_uint32(f"clip.audio.{key}", value)
    return _written(path, writer, _hearing(embd), seed)


def write_qwen2vl(path: Path, embd: int, seed: int = 1) -> Path:
    """Write a Qwen2-VL's encoder, which takes pictures of any size."""
    writer = _begun(path, "vision", "qwen2vl_merger", embd)
    for key, value in {"image_size": 10 * IMAGE, "patch_size": PATCH, "spatial_merge_size": 2}.items():
        writer.add_uint32(f"clip.vision.{key}", value)
    for key, values in CLIP.items():
        writer.add_array(f"clip.vision.image_{key}", values)
    return _written(path, writer, _qwen2vl(embd), seed)


def _begun(path: Path, kind: str, projector: str, embd: int) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_bool(f"clip.has_{kind}_encoder", True)
    writer.add_string("clip.projector_type", projector)
    writer.add_bool("clip.use_gelu", True)
    for key, value in {
        "embedding_length": STATE, "feed_forward_length": WIDE, "block_count": LAYERS, "projection_dim": embd,
        "attention.head_count": HEADS,
    }.items():  # fmt: skip
        writer.add_uint32(f"clip.{kind}.{key}", value)
    writer.add_float32(f"clip.{kind}.attention.layer_norm_epsilon", 1e-6)
    return writer


def _written(path: Path, writer: gguf.GGUFWriter, named: Iterator[tuple[str, tuple[int, ...]]], seed: int) -> Path:
    random = np.random.default_rng(seed)
    for name, shape in named:
        is_norm = "norm" in name or ".ln" in name or "_ln." in name
        middle, scale = (1.0, 0.3) if is_norm and name.endswith("weight") else (0.0, np.prod(shape[1:]) ** -0.5)
        is_plain = len(shape) < 2 or "position" in name or name.endswith("bias")
        values = random.normal(middle, 0.3 if is_plain else scale, shape)
        writer.add_tensor(name, values.astype(np.float32 if is_plain else np.float16))
    finish(writer)
    return path


def tensors(projector: str, embd: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of an encoder and of a projector (models/siglip.cpp, models/llava.cpp)."""
    yield "v.patch_embd.weight", (STATE, 3, PATCH, PATCH)
    yield "v.patch_embd.bias", (STATE,)
    yield "v.position_embd.weight", ((IMAGE // PATCH) ** 2, STATE)
    yield from _blocks("v")
    yield from PROJECTORS[projector](embd)


def _blocks(kind: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    for block in (f"{kind}.blk.{layer}" for layer in range(LAYERS)):
        for word in ("attn_q", "attn_k", "attn_v", "attn_out"):
            has_bias = kind == "v" or word != "attn_k"
            yield from (
                affine(f"{block}.{word}", STATE, STATE) if has_bias else [(f"{block}.{word}.weight", (STATE, STATE))]
            )
        yield from affine(f"{block}.ffn_up", WIDE, STATE)
        yield from affine(f"{block}.ffn_down", STATE, WIDE)
        for word in ("ln1", "ln2"):
            yield from affine(f"{block}.{word}", STATE)
    yield from affine(f"{kind}.post_ln", STATE)


def _hearing(embd: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of an encoder and of a projector (models/whisper-enc.cpp)."""
    for number, width in ((1, MEL), (2, STATE)):
        yield f"a.conv1d.{number}.weight", (STATE, width, 3)
        yield f"a.conv1d.{number}.bias", (STATE, 1)
    yield "a.position_embd.weight", (1500, STATE)
    yield from _blocks("a")
    yield "mm.a.norm_pre.weight", (STACKED * STATE,)
    yield "mm.a.mlp.1.weight", (WIDE, STACKED * STATE)
    yield "mm.a.norm_mid.weight", (WIDE // 2,)
    yield "mm.a.mlp.2.weight", (embd, WIDE // 2)


def _qwen2vl(embd: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of an encoder and of its merger (models/qwen2vl.cpp)."""
    for name in ("v.patch_embd.weight", "v.patch_embd.weight.1"):  # of two frames
        yield name, (STATE, 3, PATCH, PATCH)
    yield from _blocks("v")
    yield from affine("mm.0", 4 * STATE, 4 * STATE)
    yield from affine("mm.2", embd, 4 * STATE)


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


def write_sound(path: Path, seconds: float = 2.0, seed: int = 0) -> Path:
    """A WAV of a tone and noise."""
    time = np.arange(int(16000 * seconds)) / 16000
    values = 0.3 * np.sin(2 * np.pi * 440 * time) + 0.05 * np.random.default_rng(seed).normal(size=len(time))
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes((32767 * np.clip(values, -1, 1)).astype("<i2").tobytes())
    return path
