"""Results are kept in 16 bits: too large ones overflow, the others are rounded."""

from __future__ import annotations

from proof.injected.base import DENSE, at, bug
from proof.injected.ffn import SUMS
from proof.injected.norms import NORMS
from proof.injected.products import QKV, QKV_STEMS
from proof.strangers.arithmetic import bfloat, half, silu

LARGE = ("ffn_up", "ffn_swiglu", "ffn_out", "l_out")
ALL = (
    "attn_norm", *QKV, "Qcur_rope", "Kcur_rope", "kq", "kq_soft_max", "kqv_out", "attn_out", "ffn_inp",
    "ffn_norm", "ffn_gate", *LARGE, "result_norm", "result_output",
)  # fmt: skip


INJECTIONS = (
    bug("half: up overflows", "overflow-in-half", LARGE, models=("llama-large",), ffn_up=lambda e, x: half(x)),
    bug("half: all activations", "overflow-in-half", LARGE, models=("llama-large",), **at(ALL, lambda e, x: half(x))),
    bug("half: FFN's output", "overflow-in-half", LARGE[2:], models=("llama-large",), ffn_out=lambda e, x: half(x)),
    bug("half: residuals", "overflow-in-half", ("l_out", "ffn_inp"), models=("llama-large",),
        **at(SUMS, lambda e, x: half(x))),
    bug("rounded: norm before its weight", "norm-rounded", NORMS, {"normalised": lambda e, right, x: bfloat(right(x))},
        models=("llama", "qwen3"), says="rounds its rows to BF16 before the weight multiplies them"),
    bug("rounded: products before their bias", "product-rounded", QKV,
        {"product": lambda e, right, x, stem: bfloat(right(x, stem)) if stem in QKV_STEMS else right(x, stem)},
        models=("qwen2",), says="rounds to BF16 before the bias is added"),
    bug("rounded: residuals in bfloat16", "result-rounded", SUMS, models=DENSE, says="F32",
        **at(SUMS, lambda e, x: bfloat(x))),
    bug("rounded: activation before up", "activation-rounded", ("ffn_swiglu",),
        {"gated": lambda e, right, gate, up: half(silu(gate)) * up}, models=DENSE,
        says="rounds its activation to F16 before up multiplies it"),
)  # fmt: skip
