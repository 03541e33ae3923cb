"""The models that lie at ../shared/models beside some checkouts: without them, every test that wants one is skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FOLDER = TESTS.parent.parent / "shared" / "models"
STORIES = FOLDER / "stories260K.gguf"
RANDOM = tuple(FOLDER / "random" / f"{name}.gguf" for name in (
    "bloom.F16", "command-r.Q8_0", "deepseek2.Q8_0", "falcon.Q8_0", "gemma2.F16", "gemma3.Q8_0", "gpt-oss.Q8_0",
    "gpt2.F16", "granitehybrid.Q8_0", "lfm2.F16", "llama.F16", "llama.Q8_0", "mamba.F16", "mamba2.Q8_0", "mpt.Q8_0",
    "olmo2.BF16", "phi3.Q6_K", "qwen2.F16", "qwen3.Q4_K_M", "qwen35.F16", "qwen3moe.Q8_0", "smollm3.Q4_0",
    "stablelm.F16", "starcoder2.Q5_K_M",
))  # fmt: skip
EVERY = (STORIES, *RANDOM)


def random(name: str) -> Path:
    """The model with random weights that is called so: "llama.F16"."""
    return next(path for path in RANDOM if path.stem == name)


def existing(path: Path) -> Path:
    """A model that is there; whoever asks for another one is skipped."""
    if not path.exists():
        pytest.skip(f"the shared model {path.stem} is not beside the checkout")
    return path


def count() -> str:
    """How many are there, and what is left out where none is."""
    there = sum(path.exists() for path in EVERY)
    if there:
        return f"shared models: {there}" + f" of {len(EVERY)}" * (there < len(EVERY))
    return f"shared models: none: {len(suites())} suites are skipped in part"


def suites() -> set[str]:
    """The files of tests that want one."""
    return {path.stem for path in TESTS.glob("test_*.py") if "\nimport shared_models\n" in path.read_text()}
