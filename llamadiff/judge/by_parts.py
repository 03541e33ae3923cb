"""A prompt that is judged part by part, while llama.cpp runs it, as long as all of it clearly is right.

Each part is a pass of its own, whose attention sees the keys and values of the parts before. Where anything is not a
match, the run has to be judged as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
from llamaref.engine import Cache
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from llamadiff.engines.model_file import Runnable
from llamadiff.engines.run_spec import How
from llamadiff.judge.coverage import free_tokens
from llamadiff.judge.finding import Finding, Local
from llamadiff.judge.lanes import Lane, Source, policies_for
from llamadiff.judge.replay_tap import Study, UnclearError, lanes_of
from llamadiff.judge.run import Passes, in_a_line, one_pass, room_of, together
from llamadiff.numerics.extremes import joined
from llamadiff.numerics.metrics import Stats, ratio
from llamadiff.numerics.policies import F32, NATIVE
from llamadiff.system.progress import silent
from llamadiff.trace.reader import Trace
from llamadiff.trace.settings import kept

Array = NDArray[Any]
BASELINE = "baseline"


def judged_by_parts(model: Runnable, parts: Sequence[Trace], n_tokens: int, how: How) -> Passes | None:
    """The passes over the parts of a run, each as soon as it is there; None as soon as a layer is no match."""
    with suppress(UnclearError):
        return _passes(model, parts, n_tokens, how)
    return None


def _passes(model: Runnable, parts: Sequence[Trace], n_tokens: int, how: How) -> Passes | None:
    """The same; None where parts are of different arithmetics. Raises UnclearError for what is no match."""
    earlier, judged, lanes = _Earlier(), list[Study](), None
    model.make_room(room_of(parts[0].info) or n_tokens)
    with threadpool_limits(1, "blas"), in_a_line(model):
        for number, part in enumerate(parts):
            if number == 0:
                study, head, logits = _begun(model, part, how, earlier)
            else:
                source, replayed = _asked(model, part)
                study, _ = one_pass(
                    model, [source], replayed, part.info, how,
                    first=lanes, cache=earlier.cache, only_clear=True,
                )  # fmt: skip
            judged.append(study)
            lanes = study.lanes
            earlier.close(part.info.positions)
            part.done_with(part)
    tables = [{finding.tap.name: finding for finding in study.findings} for study in judged]
    shared = [name for name in tables[0] if all(name in table for table in tables)]  # of few keys alone scores are made
    found = [_whole([table[name] for table in tables]) for name in shared]
    if None in found:
        return None
    whole = [finding for finding in found if finding is not None]
    return Passes(together(whole, head), judged[0].judge, logits, free_tokens(n_tokens))


def _asked(model: Runnable, part: Trace, *, free: bool = False) -> tuple[Source, list[Lane]]:
    """A part of llama.cpp's run, and the lanes that it is judged by; or those that run ``free`` beside it."""
    kinds, stored = set(model.weight_types.values()), kept(part)
    source = Source(BASELINE, part, policies_for(kinds, stored, (F32, NATIVE)), stored)
    return source, [lane for lane in lanes_of([source], kinds) if (lane.source is None) == free]


def _begun(model: Runnable, part: Trace, how: How, earlier: _Earlier) -> tuple[Study, Sequence[Finding], Array]:
    """The first part, and the free run of its beginning. -> its study, what the free run shows, its logits."""
    source, replayed = _asked(model, part)
    n = len(part.info.tokens)
    head = part.head(free_tokens(n))
    beginning, free = _asked(model, head, free=True)
    if len(head.info.tokens) == n:
        study, logits = one_pass(model, [source], [*free, *replayed], part.info, how, only_clear=True)
        return study, study.findings, logits
    study, _ = one_pass(model, [source], replayed, part.info, how, cache=earlier.cache, only_clear=True)
    beside, logits = one_pass(model, [beginning], free, head.info, replace(how, progress=silent))
    return study, beside.findings, logits


class _Earlier:
    """Keys and values of the tokens before a part, by layer: [token, head, dim]."""

    def __init__(self) -> None:
        self.positions: Array = np.zeros(0, np.int64)
        self._rows: dict[int, tuple[Array, Array]] = {}
        self._own: dict[int, tuple[Array, Array]] = {}

    def cache(self) -> Cache:
        """What a step of the next part goes on from."""
        return _Continued(self)

    def followed(self, layer: int, k: Array, v: Array) -> tuple[Array, Array]:
        """Those of a layer, and a part's own after them: [lane, token, head, dim]. All lanes have the same."""
        self._own[layer] = k[0].copy(), v[0].copy()
        if layer not in self._rows:
            return k, v
        before_k, before_v = self._rows[layer]
        return _after(before_k, k), _after(before_v, v)

    def close(self, positions: Sequence[int]) -> None:
        """A part has ended: its tokens are earlier ones."""
        self.positions = np.concatenate([self.positions, positions])
        for layer, (k, v) in self._own.items():
            before_k, before_v = self._rows.get(layer, (k[:0], v[:0]))
            self._rows[layer] = np.concatenate([before_k, k]), np.concatenate([before_v, v])


class _Continued(Cache):
    """A step's cache, which begins with the tokens before a part."""

    def __init__(self, earlier: _Earlier) -> None:
        super().__init__(earlier.positions)
        self._earlier = earlier

    def append(self, layer: int, k: Array, v: Array) -> tuple[Array, Array]:
        return self._earlier.followed(layer, k, v)


def _after(before: Array, rows: Array) -> Array:
    """Rows of each lane after those that all share."""
    return np.concatenate([np.broadcast_to(before, (len(rows), *before.shape)), rows], axis=1)


# -- findings of parts as one ---------------------------------------------------------------------------------------


def _whole(parts: Sequence[Finding]) -> Finding | None:
    """A tap's finding over all parts; None where they are not of one arithmetic."""
    first, axis = parts[0], parts[0].tap.row_axis
    if len(parts) == 1:
        return first
    counts, sizes = [part.shape[axis] for part in parts], [prod(part.shape) for part in parts]
    shape = (*first.shape[:axis], sum(counts), *first.shape[axis + 1 :])
    if BASELINE not in first.local:
        return replace(first, shape=shape)
    stats, own = [part.stats[BASELINE] for part in parts], [part.local[BASELINE] for part in parts]
    if len({each.arithmetic for each in own}) > 1:
        return None
    squares = [side.rms**2 * size for side, size in zip(stats, sizes, strict=True)]
    worst = max(range(len(parts)), key=lambda number: _gap(own[number]))
    return replace(
        first,
        shape=shape,
        local={BASELINE: _joined(own, squares, counts, worst, axis)},
        stats={BASELINE: _of_all(stats, sizes, counts)},
        at=parts[worst].at,
    )


def _gap(local: Local) -> float:
    """How far a tap's worst value is off; of one that was not computed, its worst row."""
    return max(local.per_token) if local.sketched else abs(local.expected - local.recorded)


def _joined(parts: Sequence[Local], sizes: Sequence[float], counts: Sequence[int], worst: int, axis: int) -> Local:
    """Matches of one arithmetic as one: ``sizes`` are the sums of their squares, ``counts`` of their rows."""
    found, start, total = parts[worst], sum(counts[:worst]), sum(sizes)
    per_token = tuple(value for part in parts for value in part.per_token)
    sketched = any(part.sketched for part in parts)
    token = int(np.argmax(per_token)) if sketched else found.token + start if found.token is not None else None
    return replace(
        found,
        nmse=ratio(sum(part.nmse * size for part, size in zip(parts, sizes, strict=True)), total),
        least=ratio(sum(part.least * size for part, size in zip(parts, sizes, strict=True)), total),
        limit=_mean([part.limit for part in parts], counts),
        noise_limit=_mean([part.noise_limit for part in parts], counts),
        hides=max(part.hides for part in parts),
        hides_row=max(part.hides_row for part in parts),
        hides_value=max(part.hides_value for part in parts),
        per_token=per_token,
        token=token,
        index=() if sketched else tuple(i + start * (place == axis) for place, i in enumerate(found.index)),
        expected=np.nan if sketched else found.expected,
        recorded=np.nan if sketched else found.recorded,
        sketched=sketched,
    )


def _mean(values: Sequence[float], counts: Sequence[int]) -> float:
    return sum(value * count for value, count in zip(values, counts, strict=True)) / sum(counts)


def _of_all(parts: Sequence[Stats], sizes: Sequence[int], rows: Sequence[int]) -> Stats:
    """Moments of parts, of so many values and rows each, as one."""
    shapes = [part.extremes for part in parts if part.extremes is not None]
    return Stats(
        rms=_mean([part.rms**2 for part in parts], sizes) ** 0.5,
        mean=_mean([part.mean for part in parts], sizes),
        min=min(part.min for part in parts),
        max=max(part.max for part in parts),
        nan=sum(part.nan for part in parts),
        inf=sum(part.inf for part in parts),
        extremes=joined(shapes, rows) if len(shapes) == len(parts) else None,
    )
