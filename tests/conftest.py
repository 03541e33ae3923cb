"""Small models, written once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from small import write_model

OPTIONS = {
    "llama": {},
    "moe": {"arch": "llama", "experts": 4},
    "qwen2": {"arch": "qwen2", "bias": True, "kv_heads": 4},
    "qwen3": {"arch": "qwen3", "qk_norm": True},
    "stablelm": {
        "arch": "stablelm",
        "layer_norm": True,
        "extra": {
            "attention.layer_norm_epsilon": 1e-5,
            "attention.layer_norm_rms_epsilon": None,
            "rope.dimension_count": 16,
            "use_parallel_residual": False,
        },
    },
    "qwen3moe": {"arch": "qwen3moe", "qk_norm": True, "experts": 4},
}


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """small_model("qwen2", "Q8_0"): the path of such a model."""
    folder = tmp_path_factory.mktemp("models")

    def get(name: str = "llama", kind: str = "F16") -> Path:
        path = folder / f"{name}.{kind}.gguf"
        return path if path.exists() else write_model(path, kind=kind, **OPTIONS[name])

    return get
