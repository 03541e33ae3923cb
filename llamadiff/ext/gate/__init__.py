"""Limits that the logits of all positions are held to: given ones, or what rounding explains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llamadiff.plugins import Slice

if TYPE_CHECKING:
    from llamadiff.engines.run_spec import Gate
    from llamadiff.judge.study import Bench, Study
    from llamadiff.result.comparison import Comparison


class LogitsGate(Slice):
    """Limits that the logits of all positions are held to: given ones, or what rounding explains."""

    def hold_to_gate(self, result: Comparison, bench: Bench, study: Study, gate: Gate) -> Comparison:
        from llamadiff.ext.gate.gate import hold_to_gate

        return hold_to_gate(result, bench, study, gate)


slice_ = LogitsGate()
