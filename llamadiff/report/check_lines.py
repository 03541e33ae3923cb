"""What ``check`` prints: a line for each trace, and under one that failed where its recording comes from."""

from __future__ import annotations

from pathlib import Path

from llamadiff.comparison.positions import Positions
from llamadiff.comparison.provenance import provenance
from llamadiff.comparison.result import Comparison
from llamadiff.numerics import tolerances
from llamadiff.report.terminal.escape import shown

_LONG = 4000  # cells
PASSED = (tolerances.MATCH, tolerances.NOISE)


def lines_of(path: Path, result: Comparison) -> list[str]:
    """The verdict in a line, with the statistics over positions; the provenance of what failed under it."""
    said = result.summary if result.positions is None else f"{result.summary}; {in_words(result.positions)}"
    line = f"{result.verdict.upper():6}  {shown(str(path), _LONG)}: {shown(said, _LONG)}"
    if result.verdict in PASSED:
        return [line]
    return [line, f"        {shown(provenance(result), _LONG)}"]


def in_words(p: Positions) -> str:
    """The statistics over positions: what a gate holds, and the worst."""
    alike = f"{p.agreeing} of {p.count} first tokens agree"
    return (
        f"{alike}, KL mean {p.kl_mean:.1e}, 99% {p.kl_p99:.1e}, worst {p.kl_worst:.1e} after token {p.worst_at}, "
        f"regret mean {p.regret_mean:.1e}, worst {p.regret_worst:.1e}"
    )
