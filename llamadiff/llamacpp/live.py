"""A prompt that is read while llama.cpp runs it: part by part, each tap as soon as it is told (observer.py).

What was read makes room for what comes, so that gigabytes of taps go through some hundred megabytes (feed.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from llamadiff.llamacpp.capture import capture, prepared
from llamadiff.llamacpp.child import Child
from llamadiff.llamacpp.readers import RunReader, tap_values
from llamadiff.llamacpp.request import LONG, SCORES, Request
from llamadiff.system.progress import Progress
from llamadiff.trace.metadata import Info
from llamadiff.trace.reader import Trace, cut
from llamadiff.trace.taps import LOGITS

Array = NDArray[Any]
Tell = Callable[..., None]
Count = Callable[[int], int]


class UnrecordedError(Exception):
    """A tap that was expected of a run did not come."""


class Live:
    """A run that llama.cpp is at: its ``info``, but for what only its end shows, and its ``parts``."""

    def __init__(self, reader: RunReader, child: Child, progress: Progress, keeps: Count) -> None:
        """``reader``: has heard what is said before the first tap; of n tokens the rows of keeps(n) are kept."""
        self._reader, self._child, self._progress = reader, child, progress
        self.request = request = reader.request
        self.info = reader.begun()
        long = len(self.info.tokens) > LONG
        self._keeps = keeps(len(self.info.tokens))
        names = [name for name in request.wanted or () if not (long and name.startswith(SCORES))]
        self.parts = tuple(
            Part(self.info, first, last, names, self._keeps, child.tell) for first, last in reader.began["parts"]
        )
        self._first = {part.start: part for part in self.parts}
        self._ended: Future[None] = Future()
        self._is_complete = False

    def heard(self, answer: Mapping[str, Any], data: Sequence[Any]) -> bool:
        """What llama.cpp's process says of the run; a tap stays where it stands until it was read."""
        if "tap" in answer:
            values = tap_values(self._reader, answer, data)
            self._first[answer["start"]].put(answer["tap"], values, answer["at"][0])
            return True
        self._reader.heard(answer, data)
        if "ended" in answer:
            self.info, self._is_complete = self._reader.info(), True
        return False

    def end(self, error: BaseException) -> None:
        """The run is over: what did not come will not, for this reason."""
        for part in self.parts:
            part.end(error)
        self._ended.set_result(None)

    def left(self) -> Trace:
        """What is left of the run when all was read: what it says of itself, its taps' names, the first rows of logits.

        Raises UnrecordedError where it did not go to its end.
        """
        self._ended.result()
        if not self._is_complete:
            raise UnrecordedError
        return self.parts[0].head(self._keeps).under(self.info)

    def whole(self) -> Trace:
        """The run once more, all of it kept."""
        self._child.tell(enough=True)
        self._ended.result()
        return capture(replace(self.request, live=False), self._progress, self._child)


class Part(Trace):
    """Some tokens of a run, from the ``start``-th on. Whoever asks for a tap waits until it is recorded.

    Raises what the run died of instead, or UnrecordedError.
    """

    def __init__(self, info: Info, start: int, stop: int, names: Sequence[str], keeps: int, tell: Tell) -> None:
        self.start, self._keeps, self._tell = start, keeps, tell
        tokens, positions = info.tokens[start:stop], info.positions[start:stop]
        own = replace(info, tokens=tokens, positions=positions, n_prefill=len(tokens))
        self._coming, self._first = _Coming(self._await, names), _Coming(self._await, names)
        self._places: dict[str, int] = {}
        super().__init__(own, self._coming, dict.fromkeys(names, "F32"))

    def put(self, name: str, values: Array, place: int) -> None:
        """A tap was recorded, in this place of the file."""
        if name not in self:
            self._tell(read=[place])
            return
        self._places[name] = place
        n = len(self.info.tokens)
        if self.start == 0 and (self._keeps < n or name == LOGITS):
            rows = cut(name, values.shape, n, self._keeps)
            self._first.put(name, values[rows].copy() if rows is not None else values.copy())
        self._coming.put(name, values)

    def end(self, error: BaseException) -> None:
        """No more comes."""
        for coming in (self._coming, self._first):
            coming.end(error)

    def head(self, n: int) -> Trace:
        """The first tokens of the first part, which are kept apart; where these are all of them, the logits alone."""
        assert (self.start, n) == (0, self._keeps)
        return _Beginning(self.info.head(n), self._first, self.dtypes)

    def forget(self, names: Iterable[str]) -> None:
        """Nothing: pages of what goes are those of what comes."""

    def done_with(self, names: Iterable[str]) -> None:
        """Nobody reads these taps any more, nor any array that looks into them."""
        read = [self._places.pop(name) for name in names if name in self._places]
        if read:
            self._tell(read=read)

    def _await(self, name: str) -> None:
        self._tell(awaits=[self.start, name])


class _Beginning(Trace):
    """The first tokens of a run."""

    def done_with(self, names: Iterable[str]) -> None:
        assert isinstance(self._arrays, _Coming)
        self._arrays.drop(names)


class _Coming(Mapping[str, Array]):
    """Arrays of which each is there as soon as it is put; ``awaits(name)`` is called before one is waited for."""

    def __init__(self, awaits: Callable[[str], None], names: Iterable[str]) -> None:
        self._awaits, self._arrays = awaits, {name: Future[Array]() for name in names}

    def __getitem__(self, name: str) -> Array:
        coming = self._arrays[name]
        if not coming.done():
            self._awaits(name)
        return coming.result()

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __contains__(self, name: object) -> bool:
        return name in self._arrays

    def put(self, name: str, values: Array) -> None:
        self._arrays[name].set_result(values)

    def drop(self, names: Iterable[str]) -> None:
        """Forget arrays that were read: they are not there any more."""
        for name in names:
            if name in self._arrays:
                self._arrays[name] = Future()
                self._arrays[name].set_exception(UnrecordedError())

    def end(self, error: BaseException) -> None:
        for coming in self._arrays.values():
            if not coming.done():
                coming.set_exception(error)


@contextmanager
def listening(request: Request, progress: Progress, child: Child, keeps: Count) -> Iterator[Live]:
    """A run as it goes, as soon as its tokens are known. Raises UserError."""
    begun: Future[Live] = Future()

    reader = RunReader(prepared(request), child.tell)

    def hear(answer: dict[str, Any], data: Sequence[Any]) -> bool:
        if begun.done():
            return begun.result().heard(answer, data)
        reader.heard(answer, data)
        if "began" in answer:
            begun.set_result(Live(reader, child, progress, keeps))
        return False

    def ask() -> None:
        error: BaseException = UnrecordedError()
        try:
            child.ask(reader.request, progress, hear)
        except BaseException as found:  # whoever waits for the run is told
            error = found
        if begun.done():
            begun.result().end(error)
        else:
            begun.set_exception(error)

    meanwhile, child.meanwhile = child.meanwhile, []
    with ThreadPoolExecutor(1) as thread:
        thread.submit(ask)
        try:
            for each in meanwhile:
                each()
            yield begun.result()
        finally:
            child.tell(enough=True)  # or else it waits for somebody to read on
