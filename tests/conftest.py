"""Small models, written once a session."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import warm
from gguf import GGMLQuantizationType as Type
from machine import Machine
from models import random_models
from once import once
from quick import mark_slow
from small import DIM, EMBD, VOCAB, write_model
from small_others import deepseek2, gpt2, gpt_oss, mamba2, phi3

from llamadiff.comparison import judging
from llamadiff.manner import understand
from llamadiff.system import started

collect_ignore = ["sample"]  # a project of its own, whose tests test_sample.py runs

_RNG = np.random.default_rng(7)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """LLAMADIFF_TESTS=3/5: a fifth of the tests (tools/matrix.py)."""
    mark_slow(items)
    part, _, parts = os.environ.get("LLAMADIFF_TESTS", "0/1").partition("/")
    items[:] = [item for item in items if crc32(item.nodeid.encode()) % int(parts) == int(part)]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Count what was skipped, by its reason."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}")


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search for causes ends when it is through, not when a busy machine's time is up."""
    monkeypatch.setattr(judging, "LEAST_SECONDS", 600.0)
    monkeypatch.setattr(understand, "SECONDS", 600.0)


@pytest.fixture(autouse=True, scope="session")
def _warm() -> Iterator[None]:
    """llama.cpp's process is forked from a warm one; commands that have a process of their own start it as users do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(started, "subprocess", SimpleNamespace(Popen=warm.popen))
        yield


def _matrix(rows: int, columns: int, size: float = 1.0) -> np.ndarray:
    """Rows whose products with values around 1 are around ``size``."""
    return (size * _RNG.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)


def _vectors(**sizes: int) -> dict[str, np.ndarray]:
    """Biases of both layers."""
    names = [(f"blk.{i}.{stem}.bias", size) for i in range(2) for stem, size in sizes.items()]
    return {name: (0.3 * _RNG.standard_normal(size)).astype(np.float32) for name, size in names}


_STEMS = {"attn_output": EMBD, "ffn_gate": 512, "ffn_up": 512, "ffn_down": EMBD}
_SIZES = np.where(np.arange(VOCAB) % 2, 960.0, 16.0)[:, None].astype(np.float32)

OPTIONS = {
    "llama": {},
    "llama-deep": {"layers": 6},
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
    "olmo2": {
        "arch": "olmo2",
        "layers": 4,
        "pre_norm": False,
        "post_norm": True,
        "qk_norm_rows": True,
        "extra": {"attention.sliding_window": 3},
    },
    "granite": {
        "arch": "granite",
        "extra": {"attention.scale": 0.1, "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 6.0},
    },
    "gemma": {"arch": "gemma", "tied": True},
    "gemma2": {
        "arch": "gemma2",
        "layers": 3,
        "post_norm": True,
        "tied": True,
        "extra": {"attention.sliding_window": 3, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    },
    "gemma3": {
        "arch": "gemma3",
        "layers": 7,
        "post_norm": True,
        "qk_norm": True,
        "tied": True,
        "extra": {"attention.sliding_window": 3, "rope.freq_base": 1e6},
    },
    "smollm3": {"arch": "smollm3", "layers": 5},
    "qwen3moe": {"arch": "qwen3moe", "qk_norm": True, "experts": 4},
    "gpt2": gpt2(),
    "gpt-oss": gpt_oss(),
    "gpt-oss-mxfp4": gpt_oss(
        Type.MXFP4,
        **{
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
            "attention.sliding_window_pattern": [False, True],
        },
    ),
    "mamba2": mamba2(),
    "deepseek2": deepseek2(absorbed=True),
    "deepseek2-old": deepseek2(absorbed=False),
    "phi3": phi3(),
    "phi3-long": phi3(**{"rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.2}),
    "llama-base": {"extra": {"rope.freq_base": 500000.0}},
    "llama-linear": {"extra": {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}},
    "llama-yarn": {
        "extra": {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
        }
    },
    "llama-factors": {"tensors": {"rope_freqs.weight": np.linspace(1, 8, DIM // 2, dtype=np.float32)}},
    "llama-fused": {"fused_qkv": True},
    "llama-fused-bias": {"fused_qkv": True, "tensors": _vectors(attn_qkv=8 * DIM)},
    "qwen2-fused": {"arch": "qwen2", "fused_qkv": True, "bias": True, "kv_heads": 4},
    "llama-scaled": {
        "tensors": {f"blk.{i}.{stem}.scale": np.array([0.7], np.float32) for i in range(2) for stem in _STEMS},
    },
    "llama-biased": {"bias": True, "tensors": _vectors(**_STEMS)},
    "qwen2-head-biased": {
        "arch": "qwen2",
        "bias": True,
        "kv_heads": 4,
        "tensors": {"output.bias": np.linspace(-1, 1, VOCAB, dtype=np.float32)},
    },
    "llama-narrow": {
        "extra": {"feed_forward_length": EMBD},
        "tensors": {
            f"blk.{i}.ffn_{part}.weight": _matrix(EMBD, EMBD) for i in (0, 1) for part in ("gate", "up", "down")
        },
    },
    # what overflows: squares of the embedding's rows, exp of the scores, up
    "llama-large": {
        "tensors": {
            "token_embd.weight": _matrix(VOCAB, EMBD, 960.0),
            "blk.0.attn_q.weight": _matrix(4 * DIM, EMBD, 10.0),
            "blk.0.attn_k.weight": _matrix(2 * DIM, EMBD, 10.0),
            "blk.0.ffn_up.weight": _matrix(512, EMBD, 1e5),
        }
    },
    "llama-uneven": {"tensors": {"token_embd.weight": _SIZES * _matrix(VOCAB, EMBD)}},
    # epsilons that a float16 holds roughly, and not at all, with values as small
    "llama-faint": {
        "extra": {"attention.layer_norm_rms_epsilon": 1e-6},
        "tensors": {"token_embd.weight": _matrix(VOCAB, EMBD, 0.05)},
    },
    "llama-faintest": {
        "extra": {"attention.layer_norm_rms_epsilon": 1e-8},
        "tensors": {"token_embd.weight": _matrix(VOCAB, EMBD, 0.005)},
    },
}


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """small_model("qwen2", "Q8_0"): the path of such a model."""
    folder = tmp_path_factory.mktemp("models")

    def get(name: str = "llama", kind: str = "F16") -> Path:
        path = folder / f"{name}.{kind}.gguf"
        return path if path.exists() else write_model(path, kind=kind, **OPTIONS[name])

    return get


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """random_model("bloom.F16"): the path of that one of ``random_models.NAMES``."""
    folder = once(tmp_path_factory, "random-models", random_models.write)
    return lambda name: folder / f"{name}.gguf"


@pytest.fixture(scope="session")
def machine() -> Machine:
    """machine.needs(settings, path): go on only where llama.cpp survives that."""
    return Machine()
