"""Types of numbers, by ggml's names: those of 16 bits, those that a KV cache may have. Imports nothing heavy."""

from __future__ import annotations

HALVES = ("F16", "BF16")
# Those that a KV cache may have, the exact one first: what options, messages and diagnosis read. captures/README.md
# repeats it.
CACHE_TYPES = ("F32", *HALVES, "Q8_0", "Q5_0", "Q4_0")
# Their numbers (enum ggml_type), for llama.cpp's process: gguf-py, which knows all, is imported slowly.
NUMBERS = {"F32": 0, "F16": 1, "BF16": 30, "Q8_0": 8, "Q5_0": 6, "Q4_0": 2}
HALF_STEP = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}  # what rounding moves a value by at most, of its size
