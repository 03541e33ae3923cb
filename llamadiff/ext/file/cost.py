"""What a type costs: the error that honest quantization leaves on given values, asked of ggml's own quantizers."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from llamaref.weights import block_sizes, decode
from numpy.typing import NDArray

from llamadiff.ext.file.distance import SHARE, TINY
from llamadiff.ext.file.statistics import PLAIN
from llamadiff.llamacpp.child import Child
from llamadiff.llamacpp.request import Request
from llamadiff.numerics.halves import round_bf16, round_f16
from llamadiff.system.errors import UserError
from llamadiff.system.progress import silent

Array = NDArray[Any]
ROUNDED = {"F16": round_f16, "BF16": round_bf16}

# NMSE on normal values, where ggml cannot be asked: measured with its quantizers on 256 rows of 2048.
TYPICAL = {
    "Q4_0": 8e-3, "Q4_1": 6e-3, "Q5_0": 2e-3, "Q5_1": 1.5e-3, "Q8_0": 3e-5, "Q2_K": 8e-2, "Q3_K": 2.5e-2,
    "Q4_K": 6e-3, "Q5_K": 1.5e-3, "Q6_K": 4e-4, "IQ4_NL": 6e-3, "IQ4_XS": 6e-3, "MXFP4": 1.5e-2, "NVFP4": 1e-2,
    "IQ3_S": 2.5e-2, "IQ3_XXS": 3.5e-2, "IQ2_S": 8e-2, "IQ2_XS": 9e-2, "IQ2_XXS": 0.12, "IQ1_S": 0.25, "IQ1_M": 0.22,
    "TQ1_0": 0.65, "TQ2_0": 0.65, "Q1_0": 0.4,
}  # fmt: skip


@dataclass(frozen=True)
class QuantizedRows:
    """Rows of one tensor, and the type that they were quantized to: [row, value].

    ``made_so``: they have been through this type already, so that quantizing them once more costs less than it did.
    """

    kind: str
    rows: Array
    made_so: bool = False


@dataclass(frozen=True)
class Cost:
    """What a type leaves: the NMSE of all values, and that of the block where it is largest."""

    nmse: float
    worst: float


def costs_of(samples: Sequence[QuantizedRows]) -> list[Cost]:
    """The cost of each sample's type on its values."""
    asked = [i for i, sample in enumerate(samples) if _is_asked(sample)]
    made = dict(zip(asked, quantized([samples[i] for i in asked]), strict=True))
    return [_cost(sample, made.get(i)) for i, sample in enumerate(samples)]


def _is_asked(sample: QuantizedRows) -> bool:
    exact = sample.kind in PLAIN or sample.kind in ROUNDED
    return not exact and sample.rows.shape[1] % block_sizes(sample.kind)[0] == 0 and bool(sample.rows.size)


def _cost(sample: QuantizedRows, made: Array | None) -> Cost:
    if sample.kind in PLAIN or not sample.rows.size:
        return Cost(0.0, 0.0)
    if sample.kind in ROUNDED:
        made = ROUNDED[sample.kind](sample.rows)
    if made is None or (sample.made_so and sample.kind not in ROUNDED):
        typical = TYPICAL.get(sample.kind, 0.4)
        return Cost(typical, min(20 * typical, 1.0))
    block = max(block_sizes(sample.kind)[0], 1)
    width = sample.rows.shape[1]
    block = block if block > 1 and width % block == 0 else width
    gap = (made.astype(np.float64) - sample.rows).reshape(-1, block)
    own = sample.rows.astype(np.float64).reshape(-1, block)
    error, size = (gap * gap).sum(axis=1), (own * own).sum(axis=1)
    worst = float((error / np.maximum(size, SHARE * size.mean() + TINY)).max(initial=0.0))
    return Cost(float(error.sum() / max(size.sum(), TINY)), worst)


def quantized(samples: Sequence[QuantizedRows]) -> list[Array | None]:
    """Each sample through its type's blocks; None where ggml could not be asked."""
    if not samples:
        return []
    rows = [np.nan_to_num(np.clip(s.rows, -1e6, 1e6), posinf=1e6, neginf=-1e6).astype(np.float32) for s in samples]
    data = base64.b64encode(b"".join(values.tobytes() for values in rows)).decode()
    texts = tuple(f"{s.kind} {s.rows.shape[0]} {s.rows.shape[1]}" for s in samples)
    found = list[Array | None]()

    def hear(answer: dict[str, Any], blocks: Sequence[Any]) -> None:
        if "blocks" in answer:
            sample = samples[answer["blocks"]]
            made = np.frombuffer(blocks[0], np.uint8).reshape(len(sample.rows), -1)
            found.append(np.array(decode(sample.kind, made)))

    try:
        with Child() as child:
            child.ask(Request("", errand="llamadiff.ext.file.errands:quantize", texts=texts, data=data), silent, hear)
    except UserError:
        return [None] * len(samples)
    return found
