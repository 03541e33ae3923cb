"""A saved op run again in ggml, on any build and device, and judged on its inputs as ``backend`` judged it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from llamadiff.ext.cpus.device import DeviceArithmetics, replayed
from llamadiff.ext.graph.check import UNKNOWN_ROUNDING
from llamadiff.ext.graph.op import Array, Op, compute, rounded_for
from llamadiff.ext.graph.repro import load, memory_of
from llamadiff.ext.replay.result import OpRun
from llamadiff.ext.replay.saved_ops import run_saved
from llamadiff.ext.replay.shown import inputs_of
from llamadiff.llamacpp.quantizing import EightBits
from llamadiff.llamacpp.request import Settings
from llamadiff.numerics import tolerances
from llamadiff.numerics.metrics import Rows, worst_of
from llamadiff.system.errors import UserError
from llamadiff.system.progress import Progress, silent

CPU = "CPU"  # as ggml names that device


def run_ops(paths: Sequence[Path], settings: Settings, progress: Progress = silent) -> tuple[OpRun, ...]:
    """Run saved ops. Raises UserError for a file that is none, and for an op that cannot be run there."""
    ops = [load(path) for path in paths]
    found, device, q8 = run_saved(paths, settings, progress)
    return tuple(
        _judged(path, op, now, before, name, device, q8)
        for path, (op, _, before, name), now in zip(paths, ops, found, strict=True)
    )


def _judged(path: Path, op: Op, now: Array, before: Array, name: str, device: str, q8: EightBits) -> OpRun:
    """Each as its own ggml rounds: ``q8`` is that of the one that ran it now; that of the other was saved."""
    rule = tolerances.rule_for(tolerances.RULES, name, op.name, "*")
    other = DeviceArithmetics(compute) if device != CPU else None
    own = ((replace(op, q8=q8.way), now), (op, before))
    errors = [replayed(each, values, None, rule.match, other) for each, values in own]
    if errors[0] is None or errors[1] is None:
        raise UserError(f"{path}: there is no function for {op.name} that could judge it")
    limit = rule.match + errors[0].rounding
    is_known = errors[0].nmse <= limit or q8.are_known(rounded_for(op))
    _, worst = worst_of(Rows(now, 0), Rows(errors[0].values.reshape(now.shape), 0))
    return OpRun(
        path, name, op.name, inputs_of(op), device, errors[0].nmse, errors[1].nmse, limit, line=memory_of(path)[0].line,
        index=worst.index, found=worst.candidate, right=worst.baseline, problem="" if is_known else UNKNOWN_ROUNDING,
    )  # fmt: skip
