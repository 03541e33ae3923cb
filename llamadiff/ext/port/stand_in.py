"""A text model of no other use: llama-mtmd-cli looks at a picture for a text model alone, of the projector's width."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from llamaref.block_file import write_blocks

from llamadiff.engines.model_file import ModelFile
from llamadiff.llamacpp.shipped import shipped_model
from llamadiff.system.errors import UserError

WIDEST = 1 << 16
FEW = 32  # of its FFN
STACKED = "is_deepstack_layers"  # layers whose rows go into the text model's first layers, beside the last ones


def write_stand_in(path: Path, width: int) -> Path:
    """Write a model of one layer of zeros, which takes rows of this width, with the shipped model's tokenizer."""
    shipped = ModelFile(shipped_model())
    kind, known = shipped.architecture, shipped.weights.fields
    sizes = {"block_count": 1, "context_length": 4096, "embedding_length": width, "feed_forward_length": FEW,
             "attention.head_count": 1, "attention.layer_norm_rms_epsilon": 1e-5}  # fmt: skip
    fields = {f"{kind}.{key}": value for key, value in sizes.items()}
    fields |= {key: value for key, value in known.items() if key.startswith("tokenizer.")}
    shapes = {"token_embd": (len(known["tokenizer.ggml.tokens"]), width), "output_norm": (width,)}
    shapes |= {f"blk.0.{name}": (width,) for name in ("attn_norm", "ffn_norm")}
    shapes |= {f"blk.0.attn_{name}": (width, width) for name in ("q", "k", "v", "output")}
    shapes |= {f"blk.0.ffn_{name}": (FEW, width) for name in ("up", "gate")} | {"blk.0.ffn_down": (width, FEW)}
    tensors = {f"{name}.weight": ("F32", np.zeros(shape, np.float32)) if len(shape) == 1 else
               ("F16", np.zeros(shape, np.float16)) for name, shape in shapes.items()}  # fmt: skip
    write_blocks(path, kind, tensors, fields)
    return path


def width_of(fields: Mapping[str, Any], sense: str) -> int:
    """How wide the rows are that a projector file's ``vision`` or ``audio`` gives a text model. Raises UserError."""
    width, stacked = fields.get(f"clip.{sense}.projection_dim"), fields.get(f"clip.{sense}.{STACKED}")
    if type(width) is not int or not 0 < width <= WIDEST:
        raise UserError(f"clip.{sense}.projection_dim: is {str(width)[:40]}; expected how wide a text model's rows are")
    return width * (1 + (sum(map(bool, stacked)) if isinstance(stacked, list) else 0))
