"""What is usual: the mean KL that llama.cpp's own table states for each file type.

The table is "LLaMA 3 8b Scoreboard" and "LLaMA 2 vs. LLaMA 3" in llama.cpp's tools/perplexity/README.md (revision
f364eb6f, Wikitext-2): against F16, in nats, without an importance matrix where there is such a line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from llamadiff.engines.model_file import ModelFile

FILE_TYPES = {  # general.file_type, as llama.h numbers them
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE",
    39: "NVFP4", 40: "Q1_0", 41: "Q2_0",
}  # fmt: skip
LLAMA_3_8B: Mapping[str, float] = {
    "Q8_0": 0.001355, "Q6_K": 0.005452, "Q5_K_M": 0.010762, "Q5_K_S": 0.016595, "Q5_1": 0.018045, "Q5_0": 0.022239,
    "Q4_K_M": 0.031273, "IQ4_NL": 0.035742, "IQ4_XS": 0.036334, "Q4_K_S": 0.043136, "Q4_1": 0.071683, "Q4_0": 0.071940,
    "Q3_K_L": 0.087176, "Q3_K_M": 0.101913, "IQ3_M": 0.102534, "IQ3_S": 0.111278, "IQ3_XS": 0.138693,
    "IQ3_XXS": 0.183625, "Q3_K_S": 0.228217, "IQ2_M": 0.325989, "Q2_K_S": 0.403360, "IQ2_S": 0.439197, "Q2_K": 0.445132,
    "IQ2_XS": 0.546290, "IQ2_XXS": 0.812022, "IQ1_M": 1.393084, "IQ1_S": 2.254554,
}  # fmt: skip
LLAMA_2_7B: Mapping[str, float] = {"Q8_0": 0.000369, "Q6_K": 0.002098, "Q4_K_M": 0.012686, "Q2_K": 0.108903}


def file_type(model: ModelFile) -> str:
    """What the file says it is, or else the type of most of its values."""
    stated = model.weights.fields.get("general.file_type")
    if isinstance(stated, int) and stated in FILE_TYPES:
        return FILE_TYPES[stated]
    counts = Counter[str]()
    for name in model.tensors:
        rows, *_ = shape = model.weights.shape(name)
        if len(shape) > 1:
            counts[model.weights.type(name)] += rows * shape[-1]
    return counts.most_common(1)[0][0] if counts else "F32"


def published(kind: str) -> tuple[float, float] | None:
    """From what to what trained models' KL is published for a file type; None where none is."""
    known = [table[kind] for table in (LLAMA_2_7B, LLAMA_3_8B) if kind in table]
    return (min(known), max(known)) if known else None
