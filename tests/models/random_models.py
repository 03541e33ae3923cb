"""Models with random weights that llama.cpp makes: twenty-four architectures and types, once for all tests of a run.

They have every optional tensor of their architecture, and the metadata that llama.cpp saves: all its keys, many of them
zero, which it takes as unset.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from places import TESTS

_SIZES = {
    "vocab_size": 128, "context_length": 256, "embedding_length": 256, "block_count": 2, "feed_forward_length": 384,
    "attention.head_count": 4, "attention.head_count_kv": 2,
}  # fmt: skip
_ALL_HEADS = {"attention.head_count_kv": 4}
_RMS, _NORM = {"attention.layer_norm_rms_epsilon": 1e-5}, {"attention.layer_norm_epsilon": 1e-5}
_EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 384}
_SCAN = {"ssm.conv_kernel": 4, "ssm.inner_size": 512, "ssm.state_size": 128, "ssm.time_step_rank": 4}
_WINDOW = {"attention.sliding_window": 4, "attention.sliding_window_pattern": [True, False]}
_SECOND_ALONE = {"attention.head_count_kv": [0, 2]}  # attention in the second layer alone

KEYS: dict[str, dict[str, Any]] = {
    "bloom.F16": {**_NORM, **_ALL_HEADS},
    "command-r.Q8_0": {**_NORM, "logit_scale": 0.5},
    "deepseek2.Q8_0": {
        **_RMS, **_EXPERTS, "embedding_length": 256, "leading_dense_block_count": 1, "expert_shared_count": 1,
        "expert_gating_func": 2, "attention.head_count_kv": 1, "attention.q_lora_rank": 256,
        "attention.kv_lora_rank": 256, "attention.key_length": 288, "attention.value_length": 256,
        "attention.key_length_mla": 96, "attention.value_length_mla": 64, "rope.dimension_count": 32,
    },
    "falcon.Q8_0": _NORM,
    "gemma2.F16": {**_RMS, **_WINDOW, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3.Q8_0": {**_RMS, **_WINDOW},
    "gpt-oss.Q8_0": {**_RMS, **_EXPERTS, **_WINDOW},
    "gpt2.F16": {**_NORM, **_ALL_HEADS},
    "granitehybrid.Q8_0": {**_RMS, **_SCAN, **_SECOND_ALONE, "ssm.group_count": 2, "logit_scale": 2.0,
                           "residual_scale": 0.5, "rope.scaling.finetuned": True},
    "lfm2.F16": {**_RMS, **_SECOND_ALONE, "shortconv.l_cache": 3},
    "llama.F16": _RMS,
    "llama.Q8_0": {**_RMS, **_EXPERTS},
    "mamba.F16": {**_RMS, **_SCAN},
    "mamba2.Q8_0": {**_RMS, **_SCAN, "ssm.group_count": 2},
    "mpt.Q8_0": {**_NORM, **_ALL_HEADS, "attention.max_alibi_bias": 8.0, "attention.clamp_kqv": 1.0},
    "olmo2.BF16": {**_RMS, **_WINDOW},
    "phi3.Q6_K": {**_RMS, "embedding_length": 512, "feed_forward_length": 512},
    "qwen2.F16": _RMS,
    "qwen3.Q4_K_M": {**_RMS, "attention.head_count_kv": 1, "attention.key_length": 64, "attention.value_length": 64},
    "qwen35.F16": {**_RMS, **_SCAN, "ssm.inner_size": 256, "ssm.state_size": 64, "ssm.group_count": 2,
                   "rope.dimension_sections": [8, 8, 8, 8], "full_attention_interval": 2},
    "qwen3moe.Q8_0": {**_RMS, **_EXPERTS},
    "smollm3.Q4_0": {**_RMS, "block_count": 4},
    "stablelm.F16": {**_NORM, "rope.dimension_count": 16, "use_parallel_residual": False},
    "starcoder2.Q5_K_M": _NORM,
}  # fmt: skip
NAMES = tuple(KEYS)


def write(folder: Path) -> None:
    """Write every model, by a process of its own."""
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    subprocess.run([sys.executable, "-m", __name__, folder], cwd=TESTS, env=environment, check=True)


def write_all(folder: Path) -> None:
    """Write every model. Raises AssertionError with llama.cpp's words for one that it refuses."""
    from models import making

    making.start()
    for name, keys in KEYS.items():
        arch, _, kind = name.partition(".")
        refused = making.make(folder / f"{name}.gguf", arch, {**_SIZES, **keys}, kind)
        assert not refused, f"{name}: {refused[-500:]}"


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
