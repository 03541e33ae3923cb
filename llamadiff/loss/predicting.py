"""What each tensor is likely to cost, told without another run: from what the taps say is made where.

A tensor's own error is what the good file's weights would have computed from the same inputs. It reaches the logits
through the residual, so that it counts by its branch's share of that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from llamadiff.judge.finding import Finding

SIDE = "candidate"
_BRANCHES = ((".attn_", "attn_out"), (".ffn_", "ffn_out"))  # a weight's name has it -> the tap of its branch's output


def made_here(findings: Sequence[Finding]) -> dict[str, float]:
    """Tap -> the NMSE that comes of other weights alone, on the inputs of the file that is looked at."""
    own = {finding.tap.name: finding.local.get(SIDE) for finding in findings}
    return {tap: local.nmse for tap, local in own.items() if local is not None and math.isfinite(local.nmse)}


def predicted(findings: Sequence[Finding], weights: Mapping[str, str]) -> dict[str, float]:
    """Tensor -> its share of the whole loss. ``weights``: a tap's name to that of the weight that makes it."""
    made = made_here(findings)
    sizes = {each.tap.name: stats.rms for each in findings if (stats := each.stats.get(SIDE)) is not None}
    costs: dict[str, float] = {}
    for finding in findings:
        tap, weight = finding.tap, weights.get(finding.tap.name)
        if weight is not None and tap.name in made:
            share = _share(weight, tap.layer, sizes)
            costs[weight] = costs.get(weight, 0.0) + made[tap.name] * share
    total = sum(costs.values())
    return {name: cost / total for name, cost in costs.items()} if total > 0 else {}


def _share(weight: str, layer: int | None, sizes: Mapping[str, float]) -> float:
    """How much of the residual's power the branch of a weight is."""
    output = next((tap for part, tap in _BRANCHES if part in weight), "")
    branch, residual = sizes.get(f"{output}-{layer}"), sizes.get(f"l_out-{layer}")
    return (branch / residual) ** 2 if branch and residual else 1.0
