"""Results are kept in 16 bits: too large ones overflow, the others are rounded."""

from __future__ import annotations

from typing import Any

import numpy as np
from faulty import with_maths
from llamaref import ops

from proof.injected.base import DENSE, Injection, altered_at, bias, product, round_bf16, round_f16, with_linear

NORMS = ("attn_norm", "ffn_norm", "result_norm", "Qcur_normed", "Kcur_normed")
QKV = ("Qcur_proj", "Kcur_proj", "Vcur_proj")
SUMS = ("ffn_inp", "l_out")
LARGE = ("ffn_up", "ffn_swiglu", "ffn_out", "l_out")
ALL = (
    "attn_norm", *QKV, "Qcur_rope", "Kcur_rope", "kq", "kq_soft_max", "kqv_out", "attn_out", "ffn_inp",
    "ffn_norm", "ffn_gate", *LARGE, "result_norm", "result_output",
)  # fmt: skip


def _half(x: Any, run: Any) -> Any:
    return round_f16(x)


def _norm(x: Any, weight: Any, eps: float) -> Any:
    """Rounded before the weight multiplies it, as in a model whose activations are 16-bit."""
    return np.asarray(round_bf16(ops.rms_norm(x, np.float32(1), eps)) * weight)


INJECTIONS = (
    Injection("half: up overflows", "overflow-in-half", LARGE, altered_at(["ffn_up"], _half), ("llama-large",)),
    Injection("half: all activations", "overflow-in-half", LARGE, altered_at(ALL, _half), ("llama-large",)),
    Injection("half: FFN's output", "overflow-in-half", LARGE[2:], altered_at(["ffn_out"], _half), ("llama-large",)),
    Injection("half: residuals", "overflow-in-half", ("l_out", "ffn_inp"), altered_at(SUMS, _half), ("llama-large",)),
    Injection("rounded: norm before its weight", "norm-rounded", NORMS, with_maths(rms_norm=_norm),
              ("llama", "qwen3"), says="rounds its rows to BF16 before the weight multiplies them"),
    Injection("rounded: products before their bias", "product-rounded", QKV,
              with_linear(("attn_q", "attn_k", "attn_v"),
                          lambda m, x, name: round_bf16(product(m, x, name)) + bias(m, name)),
              ("qwen2",), says="rounds to BF16 before the bias is added"),
    Injection("rounded: residuals in bfloat16", "result-rounded", SUMS,
              altered_at(SUMS, lambda x, run: round_bf16(x)), DENSE, says="F32"),
    Injection("rounded: activation before up", "activation-rounded", ("ffn_swiglu",),
              with_maths(swiglu=lambda gate, up: round_f16(ops.silu(gate)) * up), DENSE,
              says="rounds its activation to F16 before up multiplies it"),
)  # fmt: skip
