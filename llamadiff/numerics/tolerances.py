"""What error is allowed where: one ordered table, first match wins, no match is an error."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Annotated

from msgspec import Meta, Struct

from llamadiff.numerics.types import HALF_STEP
from llamadiff.system.errors import UserError

# Mean squared relative error of rounding once to a type: 2^-2(p+1) / 3 for p stored bits.
ROUNDING = {kind: half**2 / 3 for kind, half in HALF_STEP.items()}


Limit = Annotated[float, Meta(ge=0, le=1e9)]


class Rule(Struct, frozen=True, forbid_unknown_fields=True):
    """The local NMSE that counts as a match for taps, ops and arithmetics these patterns fit.

    ``angle`` adds to it in proportion to the mean square of RoPE's angles (radians): float32 keeps only
    their relative precision.
    """

    match: Limit
    tap: str = "*"
    op: str = "*"
    arithmetic: str = "*"
    angle: Limit = 0.0


# Measured against llama.cpp: products <= 4e-13, other ops <= 8e-15 (the tests hold them to it). The
# limits leave room for float32 sums in another order and are still far below any known bug.
RULES: tuple[Rule, ...] = (
    Rule(1e-12, op="ROPE", angle=16 * 2.0**-48),
    Rule(1e-10, op="MUL_MAT*"),
    Rule(1e-10, op="CONV_[23]D"),  # products of what lies under a kernel
    Rule(1e-10, op="CONV_TRANSPOSE_*"),
    Rule(1e-10, op="FLASH_ATTN_EXT"),  # and what it rounds to float16 (ext/graph/ops/attention.py)
    Rule(1e-10, op="*_SCAN"),  # recurrences carry each step's rounding on
    Rule(1e-10, op="*WKV*"),
    Rule(1e-10, op="GATED_*"),
    Rule(1e-10, op="SOFT_MAX"),
    Rule(1e-10, op="GEGLU"),
    Rule(1e-12),
)


def rule_for(rules: Sequence[Rule], tap: str, op: str, arithmetic: str) -> Rule:
    """The first rule that fits; raises UserError if none does."""
    for rule in rules:
        if fnmatchcase(tap, rule.tap) and fnmatchcase(op, rule.op) and fnmatchcase(arithmetic, rule.arithmetic):
            return rule
    raise UserError(f'no tolerance fits tap {tap} (op {op}, arithmetic {arithmetic}); add a rule for tap = "*"')


# Drift that float32 sums in another order leave after each layer: nothing smaller is worth a ratio.
F32_DRIFT = 1e-12
