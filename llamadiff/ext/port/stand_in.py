"""A text model of no use but one: llama-mtmd-cli looks at a picture for a text model alone, of the projector's width."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from llamadiff.engines.model_file import ModelFile
from llamadiff.llamacpp.shipped import shipped_model
from llamadiff.system.errors import UserError

WIDEST = 1 << 16
STACKED = "is_deepstack_layers"  # layers whose rows go into the text model's first layers, beside the last ones


def write_stand_in(path: Path, width: int) -> Path:
    """Write a model of one layer of zeros, which takes rows of this width, with the shipped model's tokenizer."""
    shipped = ModelFile(shipped_model())
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {"block_count": 1, "context_length": 4096, "embedding_length": width, "feed_forward_length": 32,
                       "attention.head_count": 1}.items():  # fmt: skip
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for key, value in shipped.weights.fields.items():
        if key.startswith("tokenizer."):
            _add(writer, key, value)
    vocab = len(shipped.weights.fields["tokenizer.ggml.tokens"])
    shapes = {"token_embd": (vocab, width), "output_norm": (width,)}
    shapes |= {f"blk.0.{name}": (width,) for name in ("attn_norm", "ffn_norm")}
    shapes |= {f"blk.0.attn_{name}": (width, width) for name in ("q", "k", "v", "output")}
    shapes |= {f"blk.0.ffn_{name}": (32, width) for name in ("up", "gate")} | {"blk.0.ffn_down": (width, 32)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32 if len(shape) == 1 else np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def width_of(fields: Mapping[str, Any], sense: str) -> int:
    """How wide the rows are that a projector file's ``vision`` or ``audio`` gives a text model. Raises UserError."""
    width, stacked = fields.get(f"clip.{sense}.projection_dim"), fields.get(f"clip.{sense}.{STACKED}")
    if type(width) is not int or not 0 < width <= WIDEST:
        raise UserError(f"clip.{sense}.projection_dim: is {str(width)[:40]}; expected how wide a text model's rows are")
    return width * (1 + (sum(map(bool, stacked)) if isinstance(stacked, list) else 0))


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
