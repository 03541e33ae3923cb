"""How an engine of which only the ends of spans were recorded rounds activations and its cache.

What rounds goes through a layer to the last bit in most rows, and no other way of rounding does. So the layer is
computed in every way that engines are known to have, all at once, from what was recorded before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.engines.model_file import Runnable
from llamadiff.judge.finding import Finding
from llamadiff.judge.lanes import Source
from llamadiff.numerics.arithmetic import COMPUTES, EIGHT_BITS
from llamadiff.numerics.policies import CACHES, POLICIES
from llamadiff.numerics.rounding_tap import Carrier
from llamadiff.trace.reader import Trace
from llamadiff.trace.taps import Tap

Array = NDArray[Any]
Way = tuple[str, str]  # a policy, and the type of K and V: empty where it is what the source has

KEPT = ("", "F16", "BF16", "Q8_0", "Q4_0", "8 bits, one scale a row")  # types of K and V, the likeliest first
CLEARLY, EXACT = 0.01, 1e-9  # what the engine's own way leaves of a row: of its error, and NMSE
SPANS = 2  # that are looked at, before the head's
FEWEST = 4  # tokens of which most must be exact
WORK = 2e10  # multiply-adds for one span


class _Through(Carrier):
    """A pass in many ways, on with what a trace has; keeps what each makes of one tap."""

    def __init__(self, ways: Sequence[tuple[str, dict[str, str]]], trace: Trace, name: str) -> None:
        super().__init__(ways, edges=trace.info.edges)
        self.trace, self.name, self.made = trace, name, np.zeros(0)

    def __call__(self, name: str, x: Array) -> Array:
        x = np.broadcast_to(x, (len(self.ways), *x.shape[1:]))  # from the embedding on, each way has its own
        if name == self.name:
            self.made = x
        if name not in self.trace or name in self.trace.known or name == self.name:
            return x
        return np.broadcast_to(self.trace[name].reshape(x.shape[1:]).astype(x.dtype), x.shape)


def way_of_ends(model: Runnable, source: Source, findings: Sequence[Finding], is_stated: bool) -> Way | None:
    """The way that most rows of some span's end have, where none has it that the source is judged by; or None.

    ``is_stated``: the types of K and V are the source's own.
    """
    for finding in _open(source, findings):
        caches = KEPT[:1] if is_stated or not _kinds(source, finding) & {*CACHES} else KEPT
        ways = [(policy, kept) for kept in caches for policy in (*POLICIES, *EIGHT_BITS)]
        left = _left(model, source, finding.tap, ways)
        known = [nmse for (policy, kept), nmse in left.items() if policy in source.policies and not kept]
        policy, kept = min(left, key=lambda way: left[way], default=("", ""))
        if policy in COMPUTES and left[policy, kept] >= EXACT:  # there are finer ones of each
            left |= _left(model, source, finding.tap, [(finer, kept) for finer in COMPUTES])
            policy, kept = min(left, key=lambda way: left[way])
        if known and left[policy, kept] < min(EXACT, CLEARLY * min(known)):
            return policy, kept
    return None


def _kinds(source: Source, finding: Finding) -> frozenset[str]:
    return finding.measured[source.name].evidence.kinds


def _open(source: Source, findings: Sequence[Finding]) -> Iterator[Finding]:
    """The ends of spans with most rows not exact: one each of the first layers that have any, and of the head."""
    seen = set[int | None]()
    for finding in findings:
        local, layer = finding.local.get(source.name), finding.tap.layer
        if local is None or not local.span or layer in seen or (layer is not None and len(seen) == SPANS):
            continue
        rows = np.asarray(local.per_token)[np.isfinite(local.per_token)]
        if _kinds(source, finding) and len(rows) and np.median(rows) > EXACT:
            seen.add(layer)
            yield finding


def _left(model: Runnable, source: Source, tap: Tap, ways: Sequence[Way]) -> dict[Way, float]:
    """What each way leaves of the tap's median row, as NMSE, from the last end of a part before it that was recorded.

    Ways, then tokens are left out where all would be too much work.
    """
    info, trace = source.trace.info, source.trace
    parts = model.parts(info.tokens)
    number = 0 if len(parts) == 1 else len(parts) - 1 if tap.layer is None else tap.layer + 1
    known = next((before for before in range(number - 1, 0, -1) if source.is_whole(parts[before].end)), 0)
    rows = WORK / max(1.0, _weights(model, tap, number - known > 1 or len(parts) == 1))
    n = len(info.tokens) if model.tokens is not None else min(len(info.tokens), max(FEWEST, int(rows / len(ways))))
    ways = ways[: max(len(POLICIES), int(rows / n))]
    trace = trace.head(n) if n < len(info.tokens) else trace
    given = [(policy, source.stored | (dict.fromkeys(CACHES, kept) if kept else {})) for policy, kept in ways]
    through = _Through(given, trace, tap.name)
    step = model.engine.step(trace.info.tokens, trace.info.positions, tap=through)
    x = None
    if known:
        own = trace[parts[known].end]
        x = np.broadcast_to(own.astype(np.float32), (len(ways), *own.shape))
    for part in model.parts(trace.info.tokens)[known + 1 if known else 0 : number + 1]:
        x = part.run(x, step)
    return dict(zip(ways, _medians(through.made, trace[tap.name], tap.row_axis), strict=False))


def _weights(model: Runnable, tap: Tap, whole: bool) -> float:
    """How many weights a token is multiplied by, at most: of the tap's layer, or of all."""
    names = {model.weight_names[each.name] for each in model.taps
             if (whole or each.layer == tap.layer) and each.name in model.weight_names}  # fmt: skip
    return float(sum(np.prod(model.weights.shape(name)) for name in names))


def _medians(made: Array, recorded: Array, axis: int) -> list[float]:
    """The NMSE of each way's median row."""
    right = np.moveaxis(recorded.reshape(made.shape[1:]), axis, 0).astype(np.float64)
    size = np.square(right.reshape(len(right), -1)).sum(axis=1)
    errors = [np.square(np.moveaxis(x, axis, 0) - right).reshape(len(right), -1).sum(axis=1) for x in made]
    return [float(np.median(np.nan_to_num(error[size > 0] / size[size > 0], nan=np.inf))) for error in errors]
