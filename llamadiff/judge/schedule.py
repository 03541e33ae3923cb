"""When what is judged: an engine's parts in turn, each with the fewest lanes that will do.

A source's arithmetic is not known at first: its lanes try every legal one. Once a part has shown which fit, the others
are left out of the parts after it, and a part that does not fit is run again with all of them. So no verdict depends on
what was left out: a lane that was not tried says nothing (evidence.py), and where it might, it is tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import combinations, dropwhile
from typing import Any

from numpy.typing import NDArray

from llamadiff.engines.model_file import Part, Runnable
from llamadiff.judge.lanes import FREE, FREE_NATIVE, Lane, Source, policies_for
from llamadiff.judge.replay import Replay
from llamadiff.numerics.policies import NATIVE, READ, READ_PERTURBED
from llamadiff.trace.metadata import Info

Array = NDArray[Any]
BEYOND = 1000.0  # times as far as, or nearer than, an arithmetic is at the same op of another layer: it is not that


class Schedule:
    """Of the tokens of one run, in ``every`` lane that may be needed."""

    def __init__(self, replay: Replay, model: Runnable, info: Info) -> None:
        self.replay, self.every, self.sources = replay, replay.lanes, replay.sources
        self._taps, self._new_step = model.taps, partial(model.engine.step, info.tokens, info.positions, tap=replay)
        self._apart: dict[tuple[str, str], Mapping[str, float]] = {}  # by source and word, as all lanes showed it once
        self._kept: dict[tuple[str, str], set[str]] = {}  # the same -> policies that stay while such taps come
        self._judged = 0  # findings before the present part

    def run(self, parts: Sequence[Part], first: Sequence[Lane] | None = None) -> Array:
        """Have all parts judged -> what the last one gives. ``first``: the lanes to begin with; the likely ones, unless
        they are given.
        """
        self._step = self._new_step()
        x = parts[0].run(None, self._step)
        if len(parts) > 1:
            x = self._carry_lanes(first or self._likely(parts[1]), x)
        for part in parts[1:]:
            x = self._run_part(part, x)
            if part.end:
                x = self._drop_lanes(part, x)
        return x

    def _run_part(self, part: Part, x: Array) -> Array:
        """What a part makes of x. Where lanes that were left out might fit, it is run again with these."""
        self._judged = len(self.replay.findings)
        while True:
            y = part.run(x, self._step)
            wanted = self._missing_lanes()
            if not wanted:
                return y
            del self.replay.findings[self._judged :]
            lanes = self.replay.lanes
            x = self._carry_lanes([lane for lane in self.every if lane in lanes or lane in wanted], x)

    def _drop_lanes(self, part: Part, x: Array) -> Array:
        """What the next part begins with: the lanes that it needs, by what this one showed."""
        settled = [lane for source in self.sources.values() for lane in self._needed_lanes(source, part)]
        needed = [lane for lane in self.replay.lanes if lane.source is None or lane in settled]
        for source in self.sources.values():
            source.trace.forget([finding.tap.name for finding in self.replay.findings[self._judged :]])
        return self._carry_lanes(needed, x) if len(needed) < len(self.replay.lanes) else x

    def _carry_lanes(self, lanes: Sequence[Lane], x: Array) -> Array:
        """Go on with other lanes: what they begin with, as those of one source have the same values there."""
        now = self.replay.lanes
        first = {lane.source: number for number, lane in reversed([*enumerate(now)])}
        places = [now.index(lane) if lane in now else first[lane.source] for lane in lanes]
        self.replay.carry(lanes)
        self._step = self._new_step()
        return x[places]

    def _missing_lanes(self) -> set[Lane]:
        """The lanes that were left out, and might have fitted the present part's taps.

        An arithmetic might not that differs from those that were tried by very much more, or less, than the tap does,
        as the same op of another layer showed. Over spans all lanes measure the noise.
        """
        wanted = set[Lane]()
        for finding in self.replay.findings[self._judged :]:
            for name, measured in finding.measured.items():
                if measured.is_match:
                    continue
                own = [lane for lane in self.every if lane.source == name]
                missing, kind = {*own} - {*self.replay.lanes}, (name, finding.tap.kind.word)
                if not missing:
                    self._apart.setdefault(kind, measured.policy_distances)
                apart = {} if measured.span else self._apart.get(kind, {})
                tried = [lane.policy for lane in own if lane not in missing and not lane.is_noise_probe]
                able = {lane for lane in own if _might(measured.nmse, apart, lane, tried)}
                wanted |= able & missing
                if not able & missing:  # nor did these fit: they might, elsewhere
                    self._kept.setdefault(kind, set()).update(lane.policy for lane in able)
        return wanted

    def _needed_lanes(self, source: Source, part: Part) -> list[Lane]:
        """The lanes of a source that the parts after this one need: the fewest that fitted whatever fits."""
        own, findings = [lane for lane in self.replay.lanes if lane.source == source.name], self.replay.findings
        if not self._can_leave_out(source, part) or len(own) == 1:
            return own
        shown = [finding.fitting[source.name] for finding in findings[self._judged :] if source.name in finding.fitting]
        needed = {policies for phases in shown for policies in phases if policies}
        if not needed:
            return own
        to_come = {tap.kind.word for tap in dropwhile(lambda tap: tap.name != part.end, self._taps)}
        kept = [policies for kind, policies in self._kept.items() if kind[0] == source.name and kind[1] in to_come]
        policies = {*_cover([lane.policy for lane in own], needed)}.union(*kept)
        if source.reading:  # which fits nothing to the last bit, and is the engine's all the same
            policies |= {own[0].policy, READ, READ_PERTURBED}
        return [lane for lane in own if lane.policy in policies]

    def _likely(self, part: Part) -> list[Lane]:
        """Of llama.cpp's lanes its own arithmetic alone, the last: the others are tried where that does not fit."""
        own = [lane for lane in self.every if lane.source == "baseline"]
        left_out = own[:-1] if self._can_leave_out(self.sources["baseline"], part) else []
        return [lane for lane in self.every if lane not in left_out]

    def _can_leave_out(self, source: Source, part: Part) -> bool:
        """Whether a source's lanes all go on from a part with the same values, and none measures noise."""
        return source.is_whole(part.end) and not source.is_rough


def _might(nmse: float, apart: Mapping[str, float], lane: Lane, tried: Iterable[str]) -> bool:
    """Whether a lane may fit a tap that is so far from what was ``tried``; it may if nobody knows how far those are."""
    others = [policy for policy in tried if policy != lane.policy]
    distances = [max(apart.get(lane.policy, 0.0), apart.get(policy, 0.0)) for policy in others]
    return not apart or lane.is_noise_probe or any(other * BEYOND >= nmse >= other / BEYOND for other in distances)


def lanes_of(sources: Sequence[Source], weight_types: set[str]) -> list[Lane]:
    """The free run, the same with the baseline's arithmetic if that differs, and every source's lanes."""
    native = NATIVE in policies_for(weight_types, sources[0].stored, (FREE.policy, NATIVE))
    return [FREE, *([FREE_NATIVE] if native else []), *(lane for source in sources for lane in source.lanes)]


def _cover(policies: Sequence[str], needed: Iterable[frozenset[str]]) -> tuple[str, ...]:
    """The fewest policies of which each needed set has one, the earlier first."""
    needed = list(needed)
    tried = (some for count in range(1, len(policies)) for some in combinations(policies, count))
    return next((some for some in tried if all(wanted & set(some) for wanted in needed)), tuple(policies))
