"""The architectures that llama.cpp's graph judges here, and how small models of them are written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.options import OPTIONS
from models.small_others import bloom, deepseek2, falcon, gpt_oss, granitehybrid, lfm2

_YARN: dict[str, Any] = {
    "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64,
}  # fmt: skip
# how small models of them are written (small.write_model)
MODELS: Mapping[str, dict[str, Any]] = {
    **{name: OPTIONS[name] for name in ("gemma3", "gpt2", "phi3", "qwen3moe", "mamba2")},
    "bloom": bloom(), "falcon": falcon(), "gpt-oss": gpt_oss(**_YARN), "deepseek2": deepseek2(absorbed=True),
    "lfm2": lfm2(), "granitehybrid": granitehybrid(),
}  # fmt: skip
