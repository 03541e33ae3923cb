"""A debug log as people have it: one text file of names, first values, statistics, logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.candidates import name_map
from llamadiff.candidates.source import CandidateSource, Context
from llamadiff.ext.dumps.loglines import MAX_LINE, MAX_LINES, TOKENS, Block, Listed, Log, read_lines
from llamadiff.system.errors import UserError
from llamadiff.trace import taps
from llamadiff.trace.metadata import Info
from llamadiff.trace.reader import Number, Printed, Trace
from llamadiff.trace.taps import LOGITS

Array = NDArray[Any]
_Named = Callable[[str], tuple[taps.Tap, name_map.Entry] | None]  # a word of a log, which may end in @ROW -> its tap

MAX_BYTES = 1 << 28
SNIFFED = 4096  # bytes that tell whether a file is text
BINARY = (".safetensors", ".npz", ".npy", ".gguf")
MAX_LINES_BEFORE = 1000  # of those that state the token ids
EXAMPLE = "l_out-0: [-0.00107, 0.00575, ...] or l_out-0 rms=0.011 mean=-1.7e-4"


def matches(spec: str) -> bool:
    """A file of text."""
    path = Path(spec)
    return path.is_file() and path.suffix not in BINARY and _is_text(path)


def files(spec: str) -> Iterable[Path]:
    """The file."""
    return [Path(spec)]


def open_source(spec: str) -> CandidateSource:
    """The log, of which the token ids are read."""
    path = Path(spec)
    if path.stat().st_size > MAX_BYTES:
        raise UserError(f"{path}: {path.stat().st_size >> 20} MiB of text; write a trace instead")
    untold = f"{spec}: the log states no token ids, such as tokens: [1, 15043, 29892]"
    return CandidateSource(partial(_loaded, path), _tokens(path), untold)


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        start = file.read(SNIFFED)
    return bool(start) and not any(byte < 9 or 13 < byte < 27 for byte in start)


def _tokens(path: Path) -> tuple[int, ...]:
    """The token ids that a log begins with, if it does."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in islice(_lines(file), MAX_LINES_BEFORE):
            match = TOKENS.search(line)
            ids = match[1].replace(",", " ").split() if match else []
            if ids and all(len(word) < 10 for word in ids):
                return tuple(map(int, ids))
    return ()


def _loaded(path: Path, context: Context) -> Trace:
    """What a log says, each value in its place. Raises UserError if it says nothing of this model."""
    names = name_map.Names(context.mapping, context.model)
    named = cache(lambda word: names.tap(word.partition("@")[0]))
    with path.open(encoding="utf-8", errors="replace") as file:
        log = read_lines(_lines(file), lambda word: named(word) is not None)
    if log.logits:
        log.blocks.append(Block(LOGITS, -1, [Listed(tuple(log.logits.values()), (), tuple(log.logits), -1)]))
    filled = [block for block in log.blocks if block.lists or block.statistics]
    if not filled:
        raise UserError(_nothing(path, log))
    n_tokens = len(context.tokens)
    places = [_Place.of(tap, blocks, n_tokens, context) for tap, blocks in _by_tap(filled, named).items()]
    row, note = _assumed_row(places, context)
    arrays, known, slack = dict[str, Array](), dict[str, Array](), dict[str, Array]()
    for place in places:
        if place.rows or place.floating is not None:
            arrays[place.tap.name], known[place.tap.name], slack[place.tap.name] = place.filled(row)
    stated = {place.tap.name: place.stated for place in places if place.stated}
    printed = Printed(slack, stated, notes=(*_how_read(log), *note))
    positions, producer = tuple(range(n_tokens)), {"name": "the log", "extra": list(log.unknown)}
    info = Info(context.tokens, positions, context.n_prefill or n_tokens, None, producer, {})
    return Trace(info, arrays, dict.fromkeys(arrays, "F32"), path, known, {}, printed)


def _lines(file: Iterable[str]) -> Iterator[str]:
    """Lines up to the caps; of a longer line, nothing is read."""
    for line in islice(file, MAX_LINES):
        yield line if len(line) <= MAX_LINE else f"a line of {len(line)} characters"


def _by_tap(blocks: Sequence[Block], named: _Named) -> dict[taps.Tap, list[Block]]:
    found: dict[taps.Tap, list[Block]] = {}
    for block in blocks:
        tap = named(block.name)
        if tap is not None:
            if tap[1].done or tap[1].axes:
                raise UserError(f"[{tap[0].kind.word}] of the map has axes or done, which a log's values cannot have")
            found.setdefault(tap[0], []).append(block)
    return found


@dataclass
class _Place:
    """One tap's values: those of known rows, and those of a row that is not told (``floating``)."""

    tap: taps.Tap
    shape: tuple[int, ...]
    rows: dict[int, Listed] = field(default_factory=dict)
    floating: Listed | None = None
    stated: dict[str, Number] = field(default_factory=dict)

    @classmethod
    def of(cls, tap: taps.Tap, blocks: Sequence[Block], n_tokens: int, context: Context) -> _Place:
        place = cls(tap, taps.shape_of(tap, n_tokens, context.model.sizes))
        for block in blocks:
            place.stated = {**block.statistics, **place.stated}
        lists = [listed for block in blocks for listed in block.lists]
        told = [listed for listed in lists if listed.row is not None]
        for listed in told:
            assert listed.row is not None
            if not -n_tokens <= listed.row < n_tokens:
                raise UserError(f"{tap.name}: the log speaks of token {listed.row}; {n_tokens} were run, from 0 on")
            place.rows.setdefault(listed.row % n_tokens, listed)
        if not told and (len(lists) == n_tokens or any(listed.from_end for listed in lists)):
            front = [listed for listed in lists if not listed.from_end]
            back = [listed for listed in lists if listed.from_end]
            place.rows = {**dict(enumerate(front)), **{n_tokens - len(back) + i: one for i, one in enumerate(back)}}
        elif not told and lists:
            place.floating = lists[0]
        place._check(n_tokens)
        return place

    def _check(self, n_tokens: int) -> None:
        """Raise UserError for values that the tap has no room for; those of all rows in one list get their rows."""
        width = int(np.prod(self.shape)) // n_tokens
        if self.floating is not None and (
            len(self.floating.head) > width or max(self.floating.places, default=0) >= width
        ):
            self._split(width)
        for listed in (*self.rows.values(), *([self.floating] if self.floating else [])):
            count = max(len(listed.head) + len(listed.tail), max(listed.places, default=0) + 1)
            if count > width:
                raise UserError(f"{self.tap.name}: the log has {count} values of a row; there are {width}")
        if any(row >= n_tokens for row in self.rows):
            raise UserError(f"{self.tap.name}: the log has more rows than the {n_tokens} tokens")

    def _split(self, width: int) -> None:
        """One list over several rows, counted through."""
        listed, self.floating = self.floating, None
        assert listed is not None
        numbers = dict(zip(listed.places or range(len(listed.head)), listed.head, strict=True))
        for row in dict.fromkeys(place // width for place in numbers):
            own = {place % width: number for place, number in numbers.items() if place // width == row}
            self.rows[row] = Listed(tuple(own.values()), (), tuple(own))

    def numbers(self, listed: Listed) -> dict[int, Number]:
        """Column -> the number that stands there."""
        width = int(np.prod(self.shape)) // self.shape[self.tap.row_axis]
        if listed.places:
            return dict(zip(listed.places, listed.head, strict=True))
        first = width - len(listed.tail)
        return {**dict(enumerate(listed.head)), **{first + i: number for i, number in enumerate(listed.tail)}}

    def filled(self, row: int) -> tuple[Array, Array, Array]:
        """Values, which of them are there, and half a unit of their last digits; floating ones in this row."""
        values, known, slack = np.zeros(self.shape, np.float32), np.zeros(self.shape, bool), np.zeros(self.shape)
        axis = self.tap.row_axis
        every = {**self.rows, **({row: self.floating} if self.floating is not None else {})}
        for place, listed in every.items():
            for column, number in self.numbers(listed).items():
                rest = list(np.unravel_index(column, (*self.shape[:axis], *self.shape[axis + 1 :])))
                index = (*map(int, rest[:axis]), place, *map(int, rest[axis:]))
                values[index], known[index], slack[index] = number.value, True, number.slack
        return values, known, slack


def _assumed_row(places: Sequence[_Place], context: Context) -> tuple[int, tuple[str, ...]]:
    """The row of values that say none: the first token's or the last one's, whichever llama.cpp's are nearer to."""
    floating = [place for place in places if place.floating is not None]
    last = len(context.tokens) - 1
    if not floating or last == 0:
        return last, ()
    apart = {row: [_distance(place, row, context.baseline) for place in floating] for row in (last, 0)}
    nearer = sum(a < b for a, b in zip(apart[0], apart[last], strict=True)) * 2 > len(floating)
    row, words, other = (0, "first", "last") if nearer else (last, "last", "first")
    return row, (f"values that name no token are taken as the {words} one's (the {other} one's fit worse)",)


def _distance(place: _Place, row: int, baseline: Trace | None) -> float:
    """How far a tap's floating values are from the baseline's in a row, relative to these."""
    if baseline is None or place.tap.name not in baseline or baseline.shape(place.tap.name) != place.shape:
        return 0.0
    assert place.floating is not None
    right = np.moveaxis(baseline[place.tap.name], place.tap.row_axis, 0)[row].reshape(-1).astype(np.float64)
    numbers = place.numbers(place.floating)
    gaps = [abs(number.value - right[column]) for column, number in numbers.items()]
    size = float(np.sum(np.abs(right[list(numbers)])))
    return float(np.sum(gaps)) / size if size else float(np.sum(gaps))


def _how_read(log: Log) -> Iterator[str]:
    if any(block.lists for block in log.blocks):
        yield "a log has no op's inputs whole: its values are held against a right run from the tokens on"
    others = "".join(f', "{line[:60]}"' for line in log.others).removeprefix(", ")
    if log.understood < log.lines:
        yield f"{log.understood} of the log's {log.lines} lines were understood; the first others are {others}"


def _nothing(path: Path, log: Log) -> str:
    first = f"; the first of its {log.lines} lines is {log.others[0][:60]!r}" if log.others else ""
    unknown = next(iter(log.unknown), None)
    hint = f"; no tap is called {unknown}: --map FILE.toml translates names" if unknown else ""
    return f"{path}: no values of this model's taps in this text{first}; expected lines such as {EXAMPLE}{hint}"
