"""The engine's passes over the tokens: one with every lane; of a long prompt, one more for the free run.

It covers the beginning alone: no token after that can change what the engine computes there. The free run of a part is
a part of the free run. It measures what rounding does to a run, and a lane less makes the pass over all tokens so much
faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from llamaref import ModelError
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from llamadiff.engines.model_file import Runnable
from llamadiff.engines.run_spec import How
from llamadiff.judge.coverage import BEGINNING, LEAST
from llamadiff.judge.finding import Finding
from llamadiff.judge.lanes import Lane, Source
from llamadiff.judge.measuring import Judge
from llamadiff.judge.replay import Replay
from llamadiff.judge.schedule import Schedule, lanes_of
from llamadiff.judge.settings import settings_of
from llamadiff.judge.tap_verdicts import judge_taps
from llamadiff.judge.verdict import WRONG
from llamadiff.numerics.policies import F32, NATIVE, POLICIES
from llamadiff.numerics.rounding import Rounding
from llamadiff.system.errors import UserError
from llamadiff.system.progress import silent
from llamadiff.trace import taps
from llamadiff.trace.metadata import Info
from llamadiff.trace.reader import Trace
from llamadiff.trace.writer import TraceWriter

Array = NDArray[Any]
LONG = 256  # tokens: of a longer prompt, lanes are chosen by a look at some
LOOKED_AT = 64  # of them


@dataclass(frozen=True)
class Passes:
    """What the passes found: of every tap, who judged, and the free run's logits [token, vocab] over its tokens."""

    findings: Sequence[Finding]
    judge: Judge
    logits: Array
    free_tokens: int

    def wrong(self, source: str) -> dict[str, taps.Tap]:
        """The taps of a trace that are WRONG, by name."""
        return {
            finding.tap.name: finding.tap
            for finding in self.findings
            if source in finding.local and finding.local[source].verdict == WRONG
        }


def run_passes(
    model: Runnable,
    baseline: Trace,
    candidate: Trace | None,
    how: How,
    keep: Path | None = None,
    reading: Mapping[str, Rounding] | None = None,
    draws: int = 1,
) -> Passes:
    """Run the engine with every lane that the question needs; ``keep``: a trace file for the whole free run.

    ``reading``: roundings that were read back from the candidate; ``draws``: samples of what 16 bits do. Raises
    UserError for a trace that does not fit the model.
    """
    kinds = set(model.weight_types.values())
    # LongRoPE goes by the room there is: for the beginning of a prompt it is that of the whole
    room = settings_of(baseline).get("n_ctx")
    model.make_room(room if isinstance(room, int) and room else len(baseline.info.tokens))
    sources = [Source.of("baseline", baseline, kinds, (F32, NATIVE))]
    if candidate is not None:
        found = Source.of("candidate", candidate, kinds, POLICIES, model.taps)
        sources.append(replace(found, reading=reading or {}, draws=draws))
    lanes, n = lanes_of(sources, kinds), len(baseline.info.tokens)
    # weights are multiplied in threads of their own; BLAS threads beside them would fight for the same cores
    with threadpool_limits(1, "blas"), _in_a_line(model):
        replayed, free = ([lane for lane in lanes if bool(lane.source) == own] for own in (True, False))
        if n >= LEAST and replayed and keep is None and model.tokens is None:
            return _run_of_beginning(model, sources, replayed, free, baseline.info, how)
        replay, logits = _one_pass(model, sources, lanes, baseline.info, how, keep)
    return Passes(judge_taps(replay.findings, replay.sources), replay.judge, logits, n)


def _run_of_beginning(
    model: Runnable, sources: Sequence[Source], replayed: Sequence[Lane], free: Sequence[Lane], info: Info, how: How
) -> Passes:
    """The replay of a long prompt, and the free run of its beginning: after it, as some of it may still be recorded."""
    quiet = replace(how, progress=silent)
    first = _needed_at_first(model, sources, replayed, quiet) if LONG < len(info.tokens) == info.n_prefill else None
    whole, _ = _one_pass(model, sources, replayed, info, how, first=first)
    heads = _heads(sources, BEGINNING)
    head, logits = _one_pass(model, heads, free, heads[0].trace.info, quiet)
    findings = _join_findings(judge_taps(whole.findings, whole.sources), head.findings)
    return Passes(findings, whole.judge, logits, BEGINNING)


def _needed_at_first(model: Runnable, sources: Sequence[Source], lanes: Sequence[Lane], how: How) -> Sequence[Lane]:
    """The lanes that some of a long prompt's tokens need: all of them with every token would take much room."""
    heads = _heads(sources, LOOKED_AT, [tap.name for tap in takewhile(lambda tap: tap.layer != 1, model.taps)])
    info = heads[0].trace.info
    replay = _replay(model, heads, lanes, info, how)
    Schedule(replay, model, info).run(model.parts(info.tokens)[:2], lanes)
    return replay.lanes


def _heads(sources: Sequence[Source], n: int, names: Sequence[str] | None = None) -> list[Source]:
    """The first tokens of each; of these taps alone, if they are named."""
    return [replace(source, trace=source.trace.head(n, names)) for source in sources]


def _one_pass(
    model: Runnable,
    sources: Sequence[Source],
    lanes: Sequence[Lane],
    info: Info,
    how: How,
    keep: Path | None = None,
    first: Sequence[Lane] | None = None,
) -> tuple[Replay, Array]:
    """One pass, which begins with the ``first`` lanes -> who judged, the first lane's logits."""
    with _keep_taps(keep, model, info) as write:

        def at(name: str, x: Array) -> None:
            tap = taps.parse(name)
            if tap is not None and tap.kind.word in ("Qcur_proj", "q_a", "ssm_in"):
                how.progress(f"checking layer {tap.layer} of {model.n_layer}")
            write(name, x)

        replay = _replay(model, sources, lanes, info, how, at)
        last = Schedule(replay, model, info).run(model.parts(info.tokens), first)
        return replay, last[0] if replay.logits is None else replay.logits


def _replay(
    model: Runnable,
    sources: Sequence[Source],
    lanes: Sequence[Lane],
    info: Info,
    how: How,
    keep: Callable[[str, Array], None] = lambda name, x: None,
) -> Replay:
    """What judges these sources by these lanes."""
    judge = Judge(
        {source.name: source for source in sources}, model.weight_types, how.rules,
        np.asarray(info.positions), info.n_prefill, model.ropes, model.sizes, info.edges,
        pictured=sources[-1].name if how.pictures else None,
    )  # fmt: skip
    return Replay(judge, lanes, model, keep)


@contextmanager
def _in_a_line(model: Runnable) -> Iterator[None]:
    """What the engine cannot run, as an error of the user's."""
    try:
        yield
    except ModelError as error:
        raise UserError(f"{model.path}: {error}") from None


@contextmanager
def _keep_taps(path: Path | None, model: Runnable, info: Info) -> Iterator[Callable[[str, Array], None]]:
    """What writes taps of the free run to a trace file, if there is to be one."""
    if path is None:
        yield lambda name, x: None
        return
    with TraceWriter(path, len(model.taps)) as writer:
        yield writer.add
        writer.finish(replace(info, producer=model.producer))


def _join_findings(whole: Sequence[Finding], head: Sequence[Finding]) -> list[Finding]:
    """Findings over all tokens, with what the free run shows over the first ones."""
    free = {finding.tap.name: finding for finding in head}
    return [
        replace(
            finding,
            drift=finding.drift or free[finding.tap.name].drift,
            noise=free[finding.tap.name].noise,
            distance=free[finding.tap.name].distance,
        )
        if finding.tap.name in free else finding
        for finding in whole
    ]  # fmt: skip
