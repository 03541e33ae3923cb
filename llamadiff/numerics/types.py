"""Types of numbers, by ggml's names: those of 16 bits, those that a KV cache may have. Imports nothing heavy."""

from __future__ import annotations

HALVES = ("F16", "BF16")
# Those that a KV cache may have, the exact one first: what options, messages and diagnosis read. captures/README.md
# repeats it.
CACHE_TYPES = ("F32", *HALVES, "Q8_0", "Q5_0", "Q4_0")
# All types' numbers (enum ggml_type), for llama.cpp's process, which may have no gguf-py.
NUMBERS = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q8_1": 9, "Q2_K": 10, "Q3_K": 11,
    "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "Q8_K": 15, "IQ2_XXS": 16, "IQ2_XS": 17, "IQ3_XXS": 18, "IQ1_S": 19,
    "IQ4_NL": 20, "IQ3_S": 21, "IQ2_S": 22, "IQ4_XS": 23, "I8": 24, "I16": 25, "I32": 26, "I64": 27, "F64": 28,
    "IQ1_M": 29, "BF16": 30, "TQ1_0": 34, "TQ2_0": 35, "MXFP4": 39, "NVFP4": 40, "Q1_0": 41,
}  # fmt: skip
HALF_STEP = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}  # what rounding moves a value by at most, of its size
