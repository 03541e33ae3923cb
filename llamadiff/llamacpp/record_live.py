"""Records a prompt for a reader who judges it meanwhile: the room of what he has read is used again (live.py)."""

from __future__ import annotations

import json
import os
import time
from bisect import insort
from contextlib import suppress
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.compiled.copied import copy
from llamadiff.llamacpp.interface import Handle
from llamadiff.llamacpp.record_taps import AT_ONCE, Capture
from llamadiff.llamacpp.request import Say
from llamadiff.system.output import unwritten

Array = NDArray[Any]
AHEAD = 96 << 20  # bytes that may wait to be read, if nobody waits for more


class LetGoError(Exception):
    """The reader wants no more of this."""


class LiveCapture(Capture):
    """A capture that tells each tap as it is recorded."""

    def run(self, say: Say) -> None:
        """The batches that are asked for, one part after the other."""
        self.at_once = 2 * AT_ONCE if self.total <= 2 * AT_ONCE else AT_ONCE
        context = self._context()
        say(live=self._begun().to_json(), parts=self._parts(0, self.total))
        with Feed(Path(str(self.request.output)), say, self.hear) as self.writer, suppress(LetGoError):
            spent = self._decode_all(context, say) - self.writer.waited
            say(info=self._info(spent).to_json())

    def _decode(self, context: Handle, tokens: list[int], start: int) -> None:
        super()._decode(context, tokens, start)
        if isinstance(self.writer, Feed):
            self.writer.tell()


class Feed:
    """A file in which taps stand while they are read. The reader says which he has read, and which he waits for."""

    def __init__(self, path: Path, say: Say, hear: Queue[str]) -> None:
        self.path, self._say, self._hear = path, say, hear
        self._end, self._most, self.waited = 0, AHEAD, 0.0  # bytes; seconds that nobody read
        self._written, self._map = 0, np.empty(0, np.uint8)  # bytes that the file has; some of it, mapped
        self._sizes: dict[int, int] = {}  # of what stands in the file, by its place
        self._gaps: list[tuple[int, int]] = []  # what was read of the file, in order: from where to where
        self._sent: set[tuple[int, str]] = set()
        self._awaited: set[tuple[int, str]] = set()
        self._last: dict[str, Any] = {}  # what is to be said of the last tap: a node after it may be it, too

    def __enter__(self) -> Feed:
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def add(self, name: str, rows: Array, axis: int, shape: tuple[int, ...], start: int) -> None:
        """Take the rows ``start`` onwards of a tap, as soon as there is room for them, and tell of the tap before.

        Raises LetGoError, also for a tap that was told: that one was not all of it.
        """
        if (start, name) in self._sent:
            raise LetGoError
        rows = np.ascontiguousarray(rows)
        if self._last and self._last["tap"] == name:
            place = self._last["at"]
        else:
            self.tell()
            place = self._room(-(-rows.nbytes // 4096) * 4096)
        self._write(rows, place)
        self._last = {"tap": name, "start": start, "at": place, "shape": rows.shape, "type": rows.dtype.str}

    def tell(self) -> None:
        """Tell of the last tap."""
        if self._last:
            key = self._last["start"], self._last["tap"]
            self._sent.add(key)
            self._awaited.discard(key)
            self._say(**self._last)
            self._last = {}

    def _room(self, size: int) -> int:
        """A place for so many bytes: where something was read, or at the end, where more may wait, or is waited for."""
        while not self._hear.empty():
            self._listen()
        started = time.perf_counter()
        while (place := self._taken(size)) is None and self._end + size > self._most and not self._awaited:
            self._listen()
        self.waited += time.perf_counter() - started
        if place is None:
            place, self._end = self._end, self._end + size
        self._sizes[place] = size
        return place

    def _taken(self, size: int) -> int | None:
        """Take the beginning of the first gap that has so many bytes; None if none has."""
        for number, (start, stop) in enumerate(self._gaps):
            if stop - start >= size:
                self._gaps[number : number + 1] = [(start + size, stop)] if stop - start > size else []
                return start
        return None

    def _leave(self, place: int) -> None:
        """Something was read: its room joins the gaps beside it."""
        start, stop = place, place + self._sizes.pop(place)
        beside = [gap for gap in self._gaps if gap[1] == start or gap[0] == stop]
        for gap in beside:
            self._gaps.remove(gap)
            start, stop = min(start, gap[0]), max(stop, gap[1])
        if stop == self._end:
            self._end = start
        else:
            insort(self._gaps, (start, stop))

    def _listen(self) -> None:
        """What the reader says next."""
        said = json.loads(self._hear.get())
        for place in said.get("read", ()):
            self._leave(place)
        awaited = said.get("awaits")
        if awaited is not None and tuple(awaited) not in self._sent:
            self._awaited.add(tuple(awaited))
        if said.get("enough"):
            raise LetGoError

    def _write(self, rows: Array, place: int) -> None:
        values = rows.reshape(-1).view(np.uint8)
        if place + len(values) <= self._written:  # many times faster than to write
            if place + len(values) > len(self._map):
                self._map = np.memmap(self.path, np.uint8, "r+")
            copy(values, self._map[place : place + len(values)])
            return
        view = values.data
        try:
            while view:
                written = os.pwrite(self._file, view, place)
                view, place = view[written:], place + written
                self._written = max(self._written, place)
        except OSError as error:
            raise unwritten(self.path, error, max(self._end, AHEAD)) from None
