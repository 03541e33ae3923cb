"""A name map found by values: a tensor is the tap that the model computes from the tensors before it, under any name.

The engine runs the candidate's tokens, and goes on with a tensor of the candidate's as soon as one has the values that
it has itself, in whatever order of axes: so nothing is inherited from what is wrong. What is itself wrong has no such
values; it is the tensor from which the engine computes what the candidate has next. Of what is left, a tensor is the
tap that it is like, if it is like no other. All else stands for nothing, and the report names it.

Tensors whose names differ by a number are one kind, and the number is the layer's, or one more.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise, product
from statistics import median
from typing import Any

import numpy as np
from llamaref import Tap
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from llamadiff.candidates.name_map import Entry, Map, Names, identity_map, readings
from llamadiff.candidates.pieces import Piece, Unread, place_in_tap
from llamadiff.engines.model_file import Runnable
from llamadiff.system.errors import UserError
from llamadiff.trace import taps
from llamadiff.trace.taps import WEIGHTS

Array = NDArray[Any]

SAMPLE = 4096  # values that are compared
SAME = 1e-3  # NMSE of what is computed from the same inputs, in 8 bits too
LIKE = 0.75  # the share of a tensor that may be something else, where it is like a tap
NEAR = 0.03  # how far, relatively, a value is from the tap's that is it
APART = 1.5  # times as far is the next likely tap
TRIED = 4  # tensors that may be a tap
Lines = Mapping[str, Entry]  # the word of a tap -> what its tensors are called


class _EnoughError(Exception):
    """Ends a run of the engine: what is asked is known."""


@dataclass(frozen=True)
class _Sample:
    """Some values of a tensor or a tap, and whether each was recorded."""

    values: Array
    there: Array

    def off(self, right: _Sample) -> float:
        """NMSE."""
        own, theirs = self._both(right)
        size = float(theirs @ theirs)
        return float(np.square(own - theirs).sum()) / size if size else np.inf

    def unlike(self, right: _Sample) -> float:
        """The share that is something else: what no factor explains, or how many values are others."""
        own, theirs = self._both(right)
        size, along = float(theirs @ theirs) * float(own @ own), float(own @ theirs)
        if size == 0:
            return 1.0
        others = float(np.mean(np.abs(own - theirs) > NEAR * np.abs(theirs)))
        return min(others, 1 - along * along / size if along > 0 else 1.0)

    def _both(self, other: _Sample) -> tuple[Array, Array]:
        both = self.there & other.there & np.isfinite(self.values) & np.isfinite(other.values)
        return self.values[both], other.values[both]


class _Pieces:
    """A candidate's tensors by what a map may call them and their layer: any number in a name may be the layer's."""

    def __init__(self, pieces: Sequence[Piece], model: Runnable, n_tokens: int) -> None:
        self.model, self.n_tokens = model, n_tokens
        self.by_layer: dict[int | None, dict[str, Piece]] = {}
        for piece in pieces:
            for name, layer in _names(piece.name):
                self.by_layer.setdefault(layer, {})[name] = piece
        self._samples: dict[tuple[Entry, str], _Sample | None] = {}

    def whole(self, tap: taps.Tap, entry: Entry) -> Array | None:
        """A tap's values under a line of a map; None where there are none, or not all."""
        found = self._placed(tap, entry)
        return found[0] if found is not None and found[1] is None else None

    def sample(self, tap: taps.Tap, entry: Entry) -> _Sample | None:
        """Some of a tap's values under a line of a map."""
        key = entry, tap.name
        if key not in self._samples:
            found = self._placed(tap, entry)
            self._samples[key] = None if found is None else _sample_of(tap, *found)
        return self._samples[key]

    def _placed(self, tap: taps.Tap, entry: Entry) -> tuple[Array, Array | None] | None:
        """A tap's values, and which are known (None: all); None where the tensor is not there, or does not fit."""
        piece = self.by_layer.get(tap.layer, {}).get(entry.name)
        if piece is None:
            return None
        try:
            values, known = place_in_tap(piece, tap, entry, self.model, self.n_tokens)
        except UserError:
            return None
        return (values, known) if values.shape == taps.shape_of(tap, self.n_tokens, self.model.sizes) else None

    def lines(self, tap: taps.Tap) -> Iterator[Entry]:
        """All under which a tensor of its layer fits a tap."""
        for name, piece in self.by_layer.get(tap.layer, {}).items():
            rows = [self.n_tokens] if piece.row is not None else []
            yield from readings(name, (*rows, *piece.array.shape), tap, self.model, self.n_tokens)


class _Naming(Tap):
    """One run of the engine, from the tensors whose names are known, up to a layer; it finds others as it goes."""

    def __init__(self, pieces: _Pieces, lines: Lines, last: int | None = None) -> None:
        self.pieces, self.lines, self.last = pieces, dict(lines), last
        self.taps = {tap.name: tap for tap in pieces.model.taps}
        self.used = {each for entry in lines.values() for each in _uses(entry.name)}  # what others cannot be called
        self.met = dict[str, bool]()  # of what has a name: whether it is what the engine computes there
        self.open = dict[str, _Sample]()  # of what has none: what the engine computes

    def __call__(self, name: str, x: Array) -> Array:
        tap = self.taps.get(name)
        if tap is None:
            return x
        if self.last is not None and (tap.layer or 0) > self.last:
            raise _EnoughError
        right, word = _sample_of(tap, x[0]), tap.kind.word
        if word not in self.lines:
            found = self._nearest(tap, right)
            if found is None:
                if not tap.kind.optional:
                    self.open[name] = right
                return x
            self.lines[word] = found
            self.used |= _uses(found.name)
        own = self.pieces.sample(tap, self.lines[word])
        if own is None:
            return x
        self.met[name] = own.off(right) <= SAME
        values = self.pieces.whole(tap, self.lines[word])
        return x if values is None else values.reshape(x.shape).astype(x.dtype, copy=False)

    def is_wanted(self, name: str) -> bool:
        return True

    def _nearest(self, tap: taps.Tap, right: _Sample) -> Entry | None:
        best, least = None, SAME
        for entry in self.pieces.lines(tap):
            own = None if _taken(entry, self.used) else self.pieces.sample(tap, entry)
            if own is not None and (off := own.off(right)) < least:
                best, least = entry, off
        return best


@dataclass
class _Search:
    """Finds what the tensors are called, from the lines that are known on."""

    pieces: _Pieces
    tokens: tuple[int, ...]
    lines: dict[str, Entry]
    said: dict[str, str] = field(default_factory=dict)  # why a word has its line

    def run(self) -> None:
        """Until nothing more is found."""
        while True:
            found = self._passed(self.lines)
            self.said |= dict.fromkeys(found.lines.keys() - self.lines.keys(), "")
            self.lines = found.lines
            more = self._by_what_follows(found) or self._by_likeness(found)
            if not more:
                break
            self.lines |= more
        for word in self.said:  # in view of all that is known now
            met = [is_it for name, is_it in found.met.items() if found.taps[name].kind.word == word]
            if any(met):
                self.said[word] = f"has the values{f' in {sum(met)} of {len(met)} layers' if len(met) > 1 else ''}"

    def _passed(self, lines: Lines, last: int | None = None) -> _Naming:
        """A run from what is known, up to a layer."""
        model, tap, x = self.pieces.model, _Naming(self.pieces, lines, last), None
        step = model.engine.step(self.tokens, range(len(self.tokens)), tap=tap)
        with suppress(_EnoughError), threadpool_limits(1, "blas"), np.errstate(all="ignore"):
            for part in model.parts(self.tokens):
                x = part.run(x, step)
        return tap

    def _by_what_follows(self, found: _Naming) -> Lines:
        """A tensor, or two of which something is computed, from which the engine gets what the candidate has next."""
        firsts: dict[str, taps.Tap] = {}
        for name in found.open:
            firsts.setdefault(found.taps[name].kind.word, found.taps[name])
        likely = {word: self._likely(tap, found) for word, tap in firsts.items()}
        words = [word for word in likely if likely[word]]
        twos = [(a, b) for a, b in pairwise(words) if firsts[a].kind.op == firsts[b].kind.op]
        for some in [*((word,) for word in words), *twos]:
            best, most = dict[str, Entry](), 0
            layers = [firsts[word].layer for word in some]
            last = None if None in layers else 1 + max(layer or 0 for layer in layers)
            so_far = self._met(self._passed(self.lines, last))
            for entries in product(*(likely[word] for word in some)):
                if len({_kind(entry.name) for entry in entries}) < len(entries):
                    continue
                tried = dict(zip(some, entries, strict=True))
                gained = self._met(self._passed({**self.lines, **tried}, last), some) - so_far
                if gained > most:
                    best, most = tried, gained
            if best:
                self.said |= dict.fromkeys(best, "has not the values; what follows is computed from it")
                return best
        return {}

    def _likely(self, tap: taps.Tap, found: _Naming) -> list[Entry]:
        """What a tap may be called, the likest first."""
        left = [entry for entry in self.pieces.lines(tap) if not _taken(entry, found.used)]
        by = [(own.unlike(found.open[tap.name]), n) for n, entry in enumerate(left)
              if (own := self.pieces.sample(tap, entry)) is not None]  # fmt: skip
        return [left[n] for _, n in sorted(by)[:TRIED]]

    def _met(self, found: _Naming, but: Sequence[str] = ()) -> int:
        return sum(is_it for name, is_it in found.met.items() if found.taps[name].kind.word not in but)

    def _by_likeness(self, found: _Naming) -> Lines:
        """The tensor that is most like a tap, and like no other; and the tap like no other tensor."""
        unlike: dict[Entry, list[float]] = {}
        for name, right in found.open.items():
            for entry in self._likely(found.taps[name], found):
                own = self.pieces.sample(found.taps[name], entry)
                if own is not None:
                    unlike.setdefault(entry, []).append(own.unlike(right))
        by = sorted((median(values), entry.word, n) for n, (entry, values) in enumerate(unlike.items()))
        entries = list(unlike)
        for distance, word, n in by:
            chosen = entries[n]
            rivals = [other for other, its_word, m in by
                      if (its_word == word) != (_kind(entries[m].name) == _kind(chosen.name))]  # fmt: skip
            if distance <= LIKE and all(other >= APART * distance for other in rivals):
                self.said[word] = f"has not the values, but is like them ({1 - distance:.2f})"
                return {word: chosen}
        return {}


def map_by_values(pieces: Sequence[Piece | Unread], model: Runnable, tokens: tuple[int, ...]) -> tuple[Map, list[str]]:
    """The map of a candidate's tensors, and those of its lines that were found, as they stand in a file.

    Raises UserError where no tensor has the values of a tap.
    """
    own = Names(identity_map(), model)
    known = [found[0].kind.word for piece in pieces if (found := own.tap(piece.name)) is not None]
    shapes = [taps.shape_of(tap, len(tokens), model.sizes) for tap in model.taps]
    most = max(len(tokens) ** 2 * model.sizes["head"], *map(math.prod, shapes))
    opened = [piece.load(most) for piece in pieces if not piece.name.startswith(WEIGHTS)]
    search = _Search(_Pieces(opened, model, len(tokens)), tokens, {word: identity_map()[word] for word in known})
    search.run()
    if not search.lines:
        raise UserError(
            f"--map auto: none of the candidate's {len(pieces)} tensors has the values of a tap; llamadiff taps MODEL "
            "lists their names, and --map FILE.toml translates others"
        )
    words = dict.fromkeys(tap.kind.word for tap in model.taps)
    lines = [f"{_as_toml(search.lines[word])}  # {search.said[word]}" for word in words if word in search.said]
    return {**identity_map(), **search.lines}, lines


def _sample_of(tap: taps.Tap, values: Array, mask: Array | None = None) -> _Sample:
    """Some values of a tap, always the same ones; of scores, those of keys that a query sees."""
    there = np.ones(values.shape, bool) if mask is None else mask
    if tap.causal and values.ndim > 1:
        there = there & np.tri(*values.shape[-2:]).astype(bool)
    flat, known = values.reshape(-1), there.reshape(-1)
    chosen = _chosen(flat.size)
    return _Sample(flat[chosen].astype(np.float64), known[chosen])


@lru_cache(maxsize=64)
def _chosen(size: int) -> Array:
    """Which of so many values are compared."""
    return np.arange(size) if size <= SAMPLE else np.random.default_rng(0).integers(0, size, SAMPLE)


def _names(name: str) -> Iterator[tuple[str, int | None]]:
    """What a map may call a tensor, and the layer that it then is of."""
    yield name, None
    for number in re.finditer("[0-9]{1,9}", name):
        before, after = name[: number.start()], name[number.end() :]
        yield f"{before}{{i}}{after}", int(number[0])
        if int(number[0]):
            yield f"{before}{{i+1}}{after}", int(number[0]) - 1


def _kind(name: str) -> str:
    """What the names of one kind of tensors have in common."""
    return name.replace("{i+1}", "{i}")


def _uses(name: str) -> set[str]:
    """What no other tensor is called where one is: of its kind, or with layers counted in another way."""
    start, counted, _ = name.partition("{i}") if "{i}" in name else name.partition("{i+1}")
    return {_kind(name)} | ({start + ("{i+1}" if counted == "{i}" else "{i}")} if counted else set())


def _taken(entry: Entry, used: set[str]) -> bool:
    """Whether a tensor is called as none can be any more."""
    counted = entry.name[: entry.name.find("}") + 1]
    return counted in used or any(_kind(name) in used for name, _ in _names(entry.name))


def _as_toml(entry: Entry) -> str:
    """A line of a map, whatever a stranger's name holds: TOML's strings are escaped as JSON's."""
    said = [f"name = {json.dumps(entry.name, ensure_ascii=False)}"]
    said += [f'axes = "{" ".join(entry.axes)}"'] if entry.axes else []
    said += ["done = [" + ", ".join(f'"{each}"' for each in entry.done) + "]"] if entry.done else []
    return f"{entry.word} = {{{', '.join(said)}}}"
