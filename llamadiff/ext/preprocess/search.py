"""Which step of a processor, done otherwise, gives what an engine fed its encoder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.ext.preprocess import pictures, sounds
from llamadiff.ext.preprocess.changes import Change, changes_of, filters, merged, other_rates, rounding_of, sizes_of
from llamadiff.ext.preprocess.curves import colour_alone, noise_said
from llamadiff.ext.preprocess.dials import Dial, in_turn, turned, with_both
from llamadiff.ext.preprocess.fitting import BIAS, UNITS, Allowed, Fit, fit, is_hidden, line, places
from llamadiff.ext.preprocess.lines import normalization_of, of_picture, of_sound
from llamadiff.ext.preprocess.orders import nearest, other_orders, tiles_said
from llamadiff.ext.preprocess.planes import Planes, Reading, planes_of, readings
from llamadiff.ext.preprocess.processor import Processor
from llamadiff.numerics.arithmetic import precision
from llamadiff.system.progress import Progress

Array = NDArray[Any]
FLOAT32 = 1e-3  # of a level, what float32 takes in rescaling and normalizing
SOUND = 2.0  # times what the extractor's own ways to compute are apart
SHOWN = ("filter", "channels", "axes")  # steps that each file goes through
LOUDER = 4.0  # times that, where a changed step leaves less of a band than the extractor does
RARE = 2.0  # times as many values that are off by more than a level as between the processor's own ways to round
CLOSE = 4  # changes that come nearest, which are tried with others
DIALS = 4  # steps with a number that come nearest, whose number is searched for closely
WHOLE = 0.02  # levels by which values of 8 bits may miss whole ones
EXPLAINED = 0.2  # of what a dump is off by, the most that may be left where something explains it
MOSTLY = 0.6  # of what a dump is off by, what may be left of it where something explains it in part


@dataclass(frozen=True)
class Cause:
    """A step, and what was done in it."""

    step: str
    says: str


@dataclass(frozen=True)
class Found:
    """The causes that explain a dump together; ``error``: what they leave, rms in levels."""

    causes: tuple[Cause, ...]
    error: float
    read_as: str


class Search:
    """A dump, what the processor gives, and what rounding may do between them."""

    def __init__(self, processor: Processor, dump: Array, progress: Progress) -> None:
        self.processor, self.dump, self.progress, self.kind = processor, dump, progress, processor.kind
        self.truth_features = processor.run({})
        self.truth = planes_of(self.truth_features, self.kind)
        self.unit = UNITS[precision(dump)]
        self.level, self.exactly, self.allowed = self._measured()
        self._near = list[tuple[float, Change]]()
        self._partly = list[tuple[float, str]]()
        self._size: Array | None = None  # how many times as large as the processor's a dump's values are

    def _measured(self) -> tuple[Array, Allowed, Allowed]:
        """What rounding may do: to what the processor gives, value by value; and to that of changed steps."""
        others = [planes_of(self.processor.run(each), self.kind).values for each in self._alternatives()]
        own = self.truth.values
        if self.kind == "sound":
            level = np.ones(1)
            apart = [np.abs(other - own) for other in others if other.shape == own.shape] or [0 * own]
            computed = max((float(each.max()) for each in apart[: len(rounding_of(self.kind))]), default=0.0)
            most = SOUND * np.maximum(np.max(apart, 0).max((0, 1, 3), keepdims=True), computed) + 1e-6
            exactly = Allowed(most, level, float("inf"), self.unit, has_floor=True)
            is_other = self.processor.about["rate"] != self.processor.about["wanted"]  # its highest bands tell little
            loudest = np.maximum(most, np.median(most)) if is_other else most.max(keepdims=True)
            return level, exactly, replace(exactly, most=LOUDER * loudest)
        level = 1 / (255 * normalization_of(self.processor.config, own.shape[1])[1])
        by_channel = level.reshape(-1, 1, 1)
        apart = np.max([np.abs(other - own) / by_channel for other in others], 0)
        if apart.max() <= FLOAT32:  # nothing was resized
            most = np.broadcast_to(FLOAT32 * by_channel, (len(level), 1, 1))
            allowed = Allowed(most, level, 0.01, self.unit)
            return level, allowed, allowed
        bias = max(self._bias(other, level) for other in others)
        each = (np.maximum(apart, 1.0) + FLOAT32) * by_channel
        every = (max(1.0, float(apart.max())) + FLOAT32) * by_channel
        rare = RARE * float((apart > 1 + FLOAT32).mean())
        exactly = Allowed(each, level, BIAS + bias, self.unit)
        return level, exactly, Allowed(every, level, BIAS + bias, self.unit, rare)

    @property
    def _alike(self) -> float:
        """By how much two explanations must differ in what they leave: of alike ones the first is the plainer."""
        return FLOAT32 if self.kind == "picture" else float(self.allowed.most.max()) / 10

    @property
    def most_allowed(self) -> float:
        """The most that rounding may take of a value of what the processor gives, in levels."""
        return float((self.exactly.most / self.level.reshape(-1, 1, 1)).max())

    def _alternatives(self) -> Iterator[Mapping[str, Any]]:
        yield from rounding_of(self.kind) if self.kind == "picture" or self._is_spectral() else ()
        about = self.processor.about
        if self.kind == "sound" and about["rate"] != about["wanted"]:
            yield from other_rates()

    def _is_spectral(self) -> bool:
        try:
            for each in rounding_of(self.kind):
                self.processor.run(each)
        except LookupError:
            return False
        return True

    def _bias(self, other: Array, level: Array) -> float:
        gain, offset = line(self.truth.values, other)
        ends = np.stack([self.truth.values.min((0, 2, 3)), self.truth.values.max((0, 2, 3))])
        return float((np.abs((gain - 1) * ends + offset) / level).max())

    def right(self) -> tuple[Reading, Fit] | None:
        """The reading in which a dump is what the processor gives, but for rounding."""
        for reading in readings(self.dump, self.truth, self.kind):
            if reading.wrong is None and (found := fit(reading.values, self.truth.values, self.exactly)).exact:
                return reading, found
        return None

    def nearest(self) -> tuple[Reading, Fit] | None:
        """The right reading that is nearest to what the processor gives; None if no reading has its size."""
        return self._nearest

    @cached_property
    def _nearest(self) -> tuple[Reading, Fit] | None:
        found = [(each, fit(each.values, self.truth.values, self.exactly))
                 for each in readings(self.dump, self.truth, self.kind) if each.wrong is None]  # fmt: skip
        return min(found, key=lambda each: each[1].error, default=None)

    def where(self, reading: Reading) -> str:
        """Where a dump is off, in words."""
        axes = ("chunk", "", "band", "frame") if self.kind == "sound" else ("tile", "channel", "row", "column")
        said = places(reading.values, self.truth.values, self.exactly, axes)
        if self.kind == "picture" and self.truth.values.shape[1] == 3:
            return "; ".join(each for each in (said, colour_alone(self._seen.dump, self._seen.truth)) if each)
        return said

    def unseen(self) -> list[str]:
        """Changed steps that this file does not tell from the right ones."""
        said = []
        for change, planes in self._runs(changes_of(self.processor.about, self.kind), SHOWN):
            own = self.truth.values
            if planes.values.shape == own.shape and fit(planes.values, own, self.exactly).exact:
                said.append(change.says)
        return said

    def explain(self) -> Found | None:
        """The fewest causes that explain a dump, of these what leaves least."""
        found = list[Found]()
        for change, planes in self._runs(changes_of(self.processor.about, self.kind)):
            found += self._with(planes, (change,), self.allowed)
        found += [*self._with(self.truth, (), self.exactly), *self._in_other_orders(self.truth, ())]
        if not any(len(each.causes) == 1 for each in found):
            found += self._cut_short()
        if not any(len(each.causes) == 1 for each in found):
            found += self._in_general()
        if not found and not self._near and self.kind == "picture":
            for change, planes in self._runs(sizes_of(self.dump.shape, self.processor.about)):
                found += self._with(planes, (change,), self.allowed)
        if min((len(each.causes) for each in found), default=3) > 2:
            found += self._together()
        return min(found, key=lambda each: (len(each.causes), round(each.error / self._alike)), default=None)

    def _in_general(self) -> list[Found]:
        """What is read off the difference itself, carried out; until one cause explains the dump."""
        found, near = list[Found](), self.nearest()
        if near is None:
            return found
        reading, _ = near
        groups = self._of_sound() if self.kind == "sound" else self._of_picture()
        for group in groups:
            for each in group:
                self.progress(f"trying: {each.step}")
                if isinstance(each, Change):
                    for change, planes in self._runs(iter([each])):
                        found += self._with(planes, (change,), self.allowed)
                    continue
                got = self._fit(each.dump, each.run, self.allowed)
                self._partly.append((self._left(each.dump, each.run, got), each.says))
                causes = self._explained(got, [Cause(each.step, each.says)], reading.says, each.dump, each.run)
                found += [one for one in causes if got.exact or each.step in ("place", "logarithm")]
            if any(len(each.causes) == 1 for each in found):
                return found
        return found

    def _ask(self, request: Mapping[str, Any]) -> Array | None:
        try:
            return planes_of(self.processor.run(request), self.kind).values
        except LookupError:
            return None

    def noise(self) -> str | None:
        """Whether what a dump is off by looks like noise, in words."""
        if self.nearest() is None:
            return None
        return sounds.noise_said(self._heard) if self.kind == "sound" else noise_said(self._seen.dump, self._seen.truth)

    def _scale(self) -> tuple[Array, Array]:
        mean, deviation = normalization_of(self.processor.config, self.truth.values.shape[1])
        return mean.reshape(-1, 1, 1), deviation.reshape(-1, 1, 1)

    def _levels(self, planes: Array) -> Array:
        mean, deviation = self._scale()
        return np.asarray((planes.astype(np.float64) * deviation + mean) * 255)

    def _ask_levels(self, request: Mapping[str, Any]) -> Array | None:
        planes = self._ask(request)
        return None if planes is None else self._levels(planes)

    @cached_property
    def _seen(self) -> pictures.Seen:
        assert self._nearest is not None
        dump, about = self._nearest[0].values, self.processor.about
        return pictures.Seen(self._levels(dump), self._levels(self.truth.values), self._ask_levels,
                             lambda: self.processor.run({"source": True}).values, about)  # fmt: skip

    @cached_property
    def _heard(self) -> sounds.Heard:
        assert self._nearest is not None
        dump, truth = (np.asarray(x[0, 0], np.float64) for x in (self._nearest[0].values, self.truth.values))
        return sounds.Heard(dump, truth, self._ask, self._samples, self.processor.about)

    def _samples(self) -> tuple[Array, Mapping[str, Any]] | None:
        try:
            given = self.processor.run({"heard": True})
        except LookupError:
            return None
        return (given.values, given.more) if "mel" in given.more else None

    def _of_picture(self) -> Iterator[Iterable[Change | pictures.Reread]]:
        mean, deviation = self._scale()

        def back(found: Iterable[Change | pictures.Reread]) -> Iterator[Change | pictures.Reread]:
            for each in found:
                if isinstance(each, pictures.Reread):
                    dump, run = ((x / 255 - mean) / deviation for x in (each.dump, each.run))
                    yield replace(each, dump=dump, run=run)
                else:
                    yield each

        yield back(pictures.readings_of(self._seen))
        yield self._dials(pictures.dials_of(self.processor.about, self._seen.truth))
        yield back(pictures.lies(self._seen))

    def _of_sound(self) -> Iterator[Iterable[Change | pictures.Reread]]:
        if len(self.truth.values) == 1:
            yield sounds.changes_of()
            yield sounds.readings_of(self._heard)
            yield self._dials(sounds.dials_of(self.processor.about, self._heard))

    def _dials(self, given: Iterator[Dial]) -> Iterator[Change]:
        """Steps with the number that leaves least; and two of them, as one."""
        nothing, dials = self._after(Change("", "", {})), [*given]
        nearest: tuple[float, Dial, Change] | None = None
        for dial, change in turned(dials, self._after, nothing, DIALS):
            left = self._after(change)
            if nearest is None or left < nearest[0]:
                nearest = (left, dial, change)
            yield change
        if nearest is not None and nearest[0] < MOSTLY * nothing:
            both = in_turn(nearest[1], nearest[2], dials, self._after)
            if both is not None:
                yield Change(both[0].step, f"{both[0].says}, and {both[1].says}", with_both(*both).request)

    def _after(self, change: Change) -> float:
        """What a change leaves of a dump, rms."""
        self.progress(f"trying: {change.step}")
        try:
            planes = planes_of(self.processor.run(change.request), self.kind)
        except LookupError:
            return np.inf
        near = self.nearest()
        if near is None or planes.values.shape != near[0].values.shape:
            return np.inf
        dump = near[0].values
        return self._left(dump, planes.values, self._fit(dump, planes.values, self.allowed))

    def partly(self) -> tuple[str, float] | None:
        """What explains most of a dump that nothing explains, and what that leaves, rms."""
        near = self.nearest()
        tried = [*self._partly, *((left, change.says) for left, change in self._near)]
        tried = [each for each in tried if np.isfinite(each[0])]
        if near is None or not tried:
            return None
        left, says = min(tried, key=lambda each: each[0])
        nothing = self._left(near[0].values, self.truth.values, near[1])
        return (says, left) if left < MOSTLY * min(nothing, near[1].error) else None

    def _runs(self, changes: Iterator[Change], steps: Sequence[str] = ()) -> Iterator[tuple[Change, Planes]]:
        """What changes give that give anything else, or are of these steps."""
        for change in changes:
            self.progress(f"trying: {change.step}")
            try:
                planes = planes_of(self.processor.run(change.request), self.kind)
            except LookupError:
                continue
            same = planes.values.shape == self.truth.values.shape and np.array_equal(planes.values, self.truth.values)
            if not same or change.step in steps:
                yield change, planes

    def _with(self, planes: Planes, changes: Sequence[Change], allowed: Allowed) -> list[Found]:
        """What explains a dump beside some changes: nothing, an order in which it is read, a line of each channel."""
        causes, found = [Cause(each.step, each.says) for each in changes], list[Found]()
        least = np.inf
        for reading in readings(self.dump, planes, self.kind):
            read = [Cause("patches" if "patch" in reading.wrong else "axes", reading.wrong)] if reading.wrong else []
            got = self._fit(reading.values, planes.values, allowed)
            least = min(least, self._left(reading.values, planes.values, got))
            found += self._explained(got, [*causes, *read], reading.says, reading.values, planes.values)
        if len(changes) == 1 and np.isfinite(least):
            self._near.append((least, changes[0]))
        return [each for each in found if each.causes]

    def _explained(self, got: Fit, causes: Sequence[Cause], says: str, dump: Array, run: Array) -> list[Found]:
        nothing = self._nearest[1].error if self._nearest is not None else np.inf
        if got.exact and got.error > EXPLAINED * nothing:
            return []  # where rounding is allowed much, as of another rate, anything may be within that
        if got.exact:
            return [Found(tuple(causes), got.error, says)]
        if got.affine and not self._is_of_bytes(dump):
            step, said = (
                of_sound(got, "Whisper" in self.processor.about["class"], (float(dump.min()), float(run.min())))
                if self.kind == "sound"
                else of_picture(got, self.processor.config, self.allowed.line)
            )  # fmt: skip
            return [Found((*causes, Cause(step, said)), self._left(dump, run, got), says)]
        return []

    def _is_of_bytes(self, dump: Array) -> bool:
        """Whether a picture's values are whole levels of 0 to 255, which no other mean or deviation leaves."""
        if self.kind == "sound":
            return False
        levels = self._levels(dump)
        return bool(((np.abs(levels - np.rint(levels)) < WHOLE) & (levels > -0.5) & (levels < 255.5)).all())

    def _fit(self, dump: Array, run: Array, allowed: Allowed) -> Fit:
        most = allowed.most
        if any(n not in (1, size) for n, size in zip(most.shape[::-1], run.shape[::-1], strict=False)):
            allowed = replace(allowed, most=np.broadcast_to(most.max(), (1, 1, 1, 1)))
        return fit(dump, run, allowed)

    def _left(self, dump: Array, run: Array, got: Fit) -> float:
        """What a line of each channel leaves, rms in levels of the dump's own size."""
        by_line = got.gain[:, None, None] * run + got.offset[:, None, None]
        if self.allowed.has_floor:
            if is_hidden(run, dump):
                return float("inf")
            by_line = np.maximum(by_line, dump.min())
        if self._size is None:
            near = self.nearest()
            self._size = np.ones(1) if near is None else np.maximum(np.abs(near[1].gain), 1e-9)
        size = (self.level * self._size).reshape(-1, 1, 1)
        return float(np.sqrt(np.mean(((dump - by_line) / size) ** 2)))

    def _in_other_orders(self, planes: Planes, changes: Sequence[Change]) -> list[Found]:
        causes, found = [Cause(each.step, each.says) for each in changes], list[Found]()
        config = self.processor.config
        sizes = dict.fromkeys(
            n for n in (config.get("patch_size"), (config.get("patch_size") or 0) * (config.get("merge_size") or 0),
                        14, 16, 28, 32) if n
        )  # fmt: skip
        for reading in readings(self.dump, planes, self.kind):
            if reading.wrong is None:
                for step, says, dump, run in other_orders(reading.values, planes.values, self.kind, [*sizes]):
                    got = self._fit(dump, run, self.allowed)
                    found += self._explained(got, [*causes, Cause(step, says)], reading.says, dump, run)
        return found

    def _together(self) -> list[Found]:
        """Two changes that explain a dump: the nearest ones with each filter, with each other, in other orders."""
        self._near.sort(key=lambda each: each[0])
        near, found = [change for _, change in self._near[:CLOSE]], list[Found]()
        for change in near:
            for planes in [planes for _, planes in self._runs(iter([change]))]:
                found += self._in_other_orders(planes, (change,))
        if found:
            return found
        others = [*filters(self.processor.config)] if self.kind == "picture" else []
        others += [change for _, change in self._near[: 2 * CLOSE]]
        tried = set[tuple[str, str]]()
        for first in near:
            for second in others:
                pair = (first.says, second.says) if first.says < second.says else (second.says, first.says)
                if first.step == second.step or pair in tried:
                    continue
                tried.add(pair)
                request = merged(first.request, second.request)
                for _, planes in self._runs(iter([Change(second.step, second.says, request)])):
                    found += self._with(planes, (first, second), self.allowed)
        return found

    def _cut_short(self) -> list[Found]:
        """A dump that has more tiles or frames than the processor gives, or less, and is right as far as it goes."""
        return list(self._fewer_frames() if self.kind == "sound" else self._fewer_tiles())

    def _fewer_tiles(self) -> Iterator[Found]:
        own = self.truth.values
        each, plain = own[0].size, [n for n in self.dump.shape if n > 1]
        if self.dump.size % each or self.dump.size == own.size or len(plain) < 3:
            return
        count = self.dump.size // each
        for reading in readings(self.dump, Planes(np.broadcast_to(own[:1], (count, *own.shape[1:]))), self.kind):
            if reading.wrong is None:
                chosen = nearest(reading.values.reshape(count, -1), own.reshape(len(own), -1))
                says = f"{count} tiles, where the processor gives {len(own)}: {tiles_said(chosen, len(own))}"
                run = own[chosen]
                got = self._fit(reading.values, run, self.allowed)
                yield from self._explained(got, [Cause("tiles", says)], reading.says, reading.values, run)

    def _fewer_frames(self) -> Iterator[Found]:
        chunks, _, bands, frames = self.truth.values.shape
        own = self.truth.values[:, 0].transpose(1, 0, 2).reshape(bands, -1)  # [band, frame of all chunks]
        plain = [n for n in self.dump.shape if n > 1]
        if self.dump.size % bands or self.dump.size == own.size or bands not in plain:
            return
        if len(plain) == 3 and plain[1] == bands:
            dump = self.dump.reshape(plain).transpose(1, 0, 2).reshape(bands, -1)
        else:
            dump = self.dump.reshape(bands, -1) if plain[0] == bands else self.dump.reshape(-1, bands).T
        count, total = dump.shape[1], own.shape[1]
        short, long = (dump, own) if count < total else (own, dump)
        apart = [float(np.abs(short[:, :50] - long[:, start : start + short[:, :50].shape[1]]).mean())
                 for start in range(long.shape[1] - short.shape[1] + 1)]  # fmt: skip
        start = int(np.argmin(apart))
        part = long[:, start : start + short.shape[1]]
        ours, theirs = (part, short) if count < total else (short, part)
        step, says = "frames", f"{count} frames, where the processor gives {total}"
        rest = dump[:, total:]
        if count > total and count % frames == 0 and rest.size and np.ptp(rest) < 1e-6:
            step, says = "chunks", f"{count // frames} chunks, where the processor gives {chunks}: the rest is silent"
        elif count > total and count % frames == 0:
            step, says = "chunks", f"{count // frames} chunks, where the processor gives {chunks}"
        elif start:
            says += f", from {start} on"
        got = self._fit(theirs[None, None], ours[None, None], self.allowed)
        yield from self._explained(got, [Cause(step, says)], "", theirs[None, None], ours[None, None])
