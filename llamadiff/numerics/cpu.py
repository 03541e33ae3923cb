"""What ggml's kernels for CPUs do to a product, where it is not the same on all: what they round, and how they add.

One table, read by the policies of the judge (policies.py) and by the node checker (ext/graph). Imports nothing of ours.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

# The type that activations are rounded to, by the type of the weights (ggml-cpu.c, type_traits_cpu[].vec_dot_type).
PARTNER = {
    "F32": "F32", "F16": "F16", "BF16": "BF16",
    "Q4_0": "Q8_0", "Q5_0": "Q8_0", "Q8_0": "Q8_0", "IQ4_NL": "Q8_0", "MXFP4": "Q8_0", "NVFP4": "Q8_0", "Q1_0": "Q8_0",
    "Q4_1": "Q8_1", "Q5_1": "Q8_1",
    "Q2_K": "Q8_K", "Q3_K": "Q8_K", "Q4_K": "Q8_K", "Q5_K": "Q8_K", "Q6_K": "Q8_K",
    "IQ1_S": "Q8_K", "IQ1_M": "Q8_K", "IQ2_XXS": "Q8_K", "IQ2_XS": "Q8_K", "IQ2_S": "Q8_K",
    "IQ3_XXS": "Q8_K", "IQ3_S": "Q8_K", "IQ4_XS": "Q8_K", "TQ1_0": "Q8_K", "TQ2_0": "Q8_K",
}  # fmt: skip

# How the rounding to Q8_0 and Q8_1 is carried out (ggml-cpu/arch/*/quants.c and ggml-quants.c, quantize_row_q8_0_ref):
# AVX multiplies by 127 / max, the others by 1 / (max / 127), and plain C rounds halves away from zero, not to even.
AVX, NEON, PLAIN = "", "NEON", "plain C"
# To Q8_K (ggml-quants.c, nearest_int): where the CPU has the instruction, gcc multiplies and adds in one step, which is
# rounded once: on ARM always.
FUSED = "fused"
UNKNOWN = "unknown"  # of a ggml that was asked and gave no answer, or one of no way here
Q8_WAYS = (AVX, NEON, PLAIN, FUSED, f"{NEON}, {FUSED}", f"{PLAIN}, {FUSED}")

# How float16's numbers are added: in float32, but for ARM's CPUs that multiply float16 and have no SVE. There an output
# has several sums in float16, each of every so many channels (simd-mappings.h, GGML_F16_STEP; llamafile/sgemm.cpp).
IN_FLOAT, IN_HALF, IN_HALF_TILES = "", "float16", "float16, in tiles"
ROW_LANES, TILE_LANES = 32, 8
HALF_LANES = (TILE_LANES, ROW_LANES)
_TILE_ROWS, _TILE_OUTPUTS = (8, 4)  # rows at least; outputs are a multiple

# Flash attention (ggml-cpu/common.h, ggml_fa_tile_config): queries from which on scores are in tiles, all in float32;
# else V in float16 is summed in it, and weights are float16 in so many channels at a time (ARM, AVX512-FP16).
FLASH_TILE, FLASH_LANES = 64, (32, 128)

# ggml-blas (BLAS, Accelerate), where llama.cpp was built with it: tokens of one pass from which on products by a weight
# are its, by floats that are not rounded (ggml-blas.cpp, min_batch); those of fewer are the CPU's own.
BLAS_ROWS = 32


def phases(edges: Sequence[int], n_prefill: int) -> tuple[slice, ...]:
    """Tokens that one arithmetic holds for, the first of them last: those of the prefill, those of decode steps; and of
    either, batches (``edges``: where they begin, and the end) that BLAS multiplies are not with those that it leaves.
    """
    begun = zip(edges, (stop - start >= BLAS_ROWS for start, stop in pairwise(edges)), strict=False)
    changes = [start for (_, before), (start, now) in pairwise(begun) if before != now]
    starts = sorted({0, n_prefill, *changes})
    return tuple(slice(start, stop) for start, stop in pairwise([*starts, None]))[::-1]


def q8_way(q8_0: str, q8_k: str) -> str:
    """One of Q8_WAYS: how Q8_0 is rounded to, and how Q8_K is (FUSED, or nothing)."""
    return ", ".join(filter(None, (q8_0, q8_k)))


def stated_q8_way(said: object) -> str:
    """The one of Q8_WAYS that was stated; UNKNOWN for all else."""
    return said if isinstance(said, str) and said in Q8_WAYS else UNKNOWN


def fuses(features: str) -> bool:
    """Whether compilers fuse a product and a sum on a CPU, by llama.cpp's line of its features."""
    return any(_parse_features(features).get(name) for name in ("FMA", "NEON"))


def _parse_features(features: str) -> dict[str, bool]:
    """The features that a line names, and whether a CPU has each."""
    return {name: value != "0" for name, value in re.findall(r"(\w+) = (\d+)", features)}


def sums_of(features: str) -> str:
    """How a CPU adds products of float16's numbers, by llama.cpp's line of its features; UNKNOWN if it names none."""
    named = _parse_features(features)
    if not named:
        return UNKNOWN
    has = {name for name, is_there in named.items() if is_there}
    if not {"NEON", "FP16_VA"} <= has or "SVE" in has:
        return IN_FLOAT
    return IN_HALF_TILES if "LLAMAFILE" in has else IN_HALF


def lanes_of(sums: str, rows: int, channels: int, outputs: int) -> int:
    """How many float16 sums each output has, of so many ``rows`` at once; 0 where sums are float32's."""
    if sums == IN_FLOAT:
        return 0
    tiled = rows >= _TILE_ROWS and channels % TILE_LANES == 0 and outputs % _TILE_OUTPUTS == 0
    return TILE_LANES if tiled and sums == IN_HALF_TILES else ROW_LANES
