"""The model that comes with the package."""

from __future__ import annotations

from pathlib import Path


def shipped_model(quantized: bool = False) -> Path:
    """The path of the model that comes with the package."""
    return Path(__file__).parent.parent / "shipped" / ("tiny.Q4_K_M.gguf" if quantized else "tiny.F16.gguf")
