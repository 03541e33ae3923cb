"""What llama.cpp's process sends besides words: bytes, in memory that both processes share, or behind the words.

Shared memory is a file that the parent made. The room of what it has read is used again, so that gigabytes go through
some hundred megabytes. Where the two share none (another machine, a container), bytes follow on standard output, and
as many may be unread.
"""

from __future__ import annotations

import json
import os
from bisect import insort
from collections.abc import Sequence
from mmap import mmap
from queue import Queue
from typing import Any, BinaryIO

AHEAD = 96 << 20  # bytes that may wait to be read
PAGE = 4096
GROWTH = 32 << 20  # bytes by which the file grows


class Voice:
    """The child's standard output: JSON lines, each with as many bytes behind it as it says in ``inline``."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def __call__(self, **answer: Any) -> None:
        self.send(answer)

    def send(self, answer: dict[str, Any], parts: Sequence[Any] = ()) -> None:
        """Say something, with bytes behind it."""
        self._stream.write(json.dumps(answer).encode() + b"\n")
        for part in parts:
            self._stream.write(part)
        self._stream.flush()


class Feed:
    """Events of a run with their bytes. The reader says which he has read."""

    def __init__(self, voice: Voice, hear: Queue[str], shared: int | None) -> None:
        """``shared``: the descriptor of the file in which bytes are written; None: they follow the words."""
        self._voice, self._hear, self._shared = voice, hear, shared
        self._end, self._most = 0, AHEAD
        self._map: mmap | None = None
        self._sizes: dict[int, int] = {}  # of what is unread, by its place
        self._gaps: list[tuple[int, int]] = []  # what was read, in order: from where to where
        self._last: tuple[dict[str, Any], list[Any]] | None = None  # a tap; a node after it may be it, too
        self.heard: list[dict[str, Any]] = []  # what the reader said of the run itself

    def tap(self, event: dict[str, Any], data: Any) -> None:
        """Take some rows of a tap, and tell of the tap before."""
        key = event["start"], event["tap"]
        if self._last is not None and (self._last[0]["start"], self._last[0]["tap"]) == key:
            event["blobs"] = self._last[0]["blobs"]
        else:
            self.tell()
            event["blobs"] = [self._place(len(data))]
        self._last = event, [self._write_blob(event["blobs"][0], data)]

    def tell(self) -> None:
        """Tell of the last tap."""
        if self._last is None:
            return
        event, parts = self._last
        self._last = None
        self._voice.send(event, [part for part in parts if part is not None])

    def send(self, event: dict[str, Any], *data: Any) -> None:
        """Tell of anything else, with bytes."""
        self.tell()
        blobs = [self._place(len(part)) for part in data]
        parts = [self._write_blob(blob, part) for blob, part in zip(blobs, data, strict=True)]
        self._voice.send({**event, "blobs": blobs} if blobs else event, [part for part in parts if part is not None])

    def await_word(self, word: str) -> Any:
        """What the reader says of the run, under this word."""
        self.tell()
        while True:
            for number, said in enumerate(self.heard):
                if word in said:
                    return self.heard.pop(number)[word]
            self._listen()

    def _place(self, size: int) -> list[int]:
        """For so many bytes a place where something was read, or at the end, where more may wait:
        [place, bytes, whether it is in shared memory].
        """
        room = -(-max(1, size) // PAGE) * PAGE
        while not self._hear.empty():
            self._listen()
        while (place := self._take_gap(room)) is None and self._end and self._end + room > self._most:
            self._listen()
        if place is None:
            place, self._end = self._end, self._end + room
        self._sizes[place] = room
        return [place, size, int(self._has(place + size))]

    def _take_gap(self, size: int) -> int | None:
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
        for place in said.pop("read", ()):
            self._leave(place)
        if said:
            self.heard.append(said)

    def _write_blob(self, blob: Sequence[Any], data: Any) -> Any:
        """Write bytes to their place -> those that follow the words instead."""
        place, size, is_shared = blob
        if not is_shared:
            return bytes(data)
        if size:
            assert self._map is not None
            self._map[place : place + size] = data
        return None

    def _has(self, size: int) -> bool:
        """Whether there is shared memory of so many bytes; where it may not grow, there is none from now on."""
        if self._shared is not None and (self._map is None or len(self._map) < size):
            whole = max(-(-size // GROWTH) * GROWTH, os.fstat(self._shared).st_size)
            try:
                os.ftruncate(self._shared, whole)
                self._map = mmap(self._shared, whole)
            except (OSError, ValueError):
                self._shared = None
        return self._shared is not None
