"""The trace of a prompt that llama.cpp is still at: it is judged from its first layer on, while the others are run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from llamadiff.llamacpp.capture import read_run
from llamadiff.llamacpp.child import Child
from llamadiff.llamacpp.readers import TapReader, Tell
from llamadiff.llamacpp.request import LONG, SCORES, Request
from llamadiff.system.output import check_target
from llamadiff.system.progress import Progress
from llamadiff.trace.metadata import Info
from llamadiff.trace.reader import Trace
from llamadiff.trace.taps import layer_of

Array = NDArray[Any]


class StreamingTrace(Trace):
    """A run from its beginning on. Whoever asks for a tap, or whether there is one, waits until it is recorded, or the
    run is over; then its ``info`` is complete. Raises what the run died of.
    """

    is_float32 = True

    def __init__(self, info: Info, names: Iterable[str], path: Path, ended: Future[Info]) -> None:
        """``ended``: what there is to say at its end."""
        self._coming, self._ended = _Coming(names), ended
        super().__init__(info, self._coming, dict.fromkeys(self._coming.taps, "F32"), path)
        ended.add_done_callback(self._end)

    def wait(self) -> None:
        self.info = self._ended.result()

    def put(self, name: str, kind: str, values: Array) -> None:
        """A tap is recorded, all of it."""
        self.dtypes = {**self.dtypes, name: kind}
        self._coming.taps[name].set_result(values)

    def _end(self, ended: Future[Info]) -> None:
        """What did not come will not."""
        error = ended.exception()
        for tap in self._coming.taps.values():
            if not tap.done():
                tap.set_result(None) if error is None else tap.set_exception(error)


class _Coming(Mapping[str, "Array"]):
    """Arrays that are waited for; None stands for one that does not come."""

    def __init__(self, names: Iterable[str]) -> None:
        self.taps = {name: Future["Array | None"]() for name in names}

    def __getitem__(self, name: str) -> Array:
        values = self.taps[name].result()
        if values is None:
            raise KeyError(name)
        return values

    def __contains__(self, name: object) -> bool:
        return name in self.taps and self.taps[str(name)].result() is not None

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.taps if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _ComingReader(TapReader):
    """Writes the trace, and shows each layer's taps as they stand in the file."""

    def __init__(self, request: Request, tell: Tell, begun: Future[StreamingTrace], ended: Future[Info]) -> None:
        super().__init__(request, tell)
        self._told, self._over = begun, ended
        self._held: dict[str, tuple[str, Array]] = {}  # of the present layer: another node may be one of them, too
        self._layer: int | None = None

    def _began(self, answer: Mapping[str, Any], data: Sequence[Any]) -> None:
        super()._began(answer, data)
        assert self.request.output is not None
        without = SCORES if self.total > LONG and not self.request.scores else ()
        names = (name for name in self.request.wanted or () if not name.startswith(without))
        self._told.set_result(StreamingTrace(self.starting_info(), names, Path(self.request.output), self._over))

    def _tap(self, answer: Mapping[str, Any], data: Sequence[Any]) -> None:
        name, layer = answer["tap"], layer_of(answer["tap"])
        if layer != self._layer:
            self._show()
            self._layer = layer
        super()._tap(answer, data)
        mapped = self.writer.mapped(name) if answer["start"] + answer["rows"] == self.total else None
        if mapped is not None:
            self._held[name] = mapped

    def _show(self) -> None:
        """A layer is over."""
        for name, mapped in self._held.items():
            self._told.result().put(name, *mapped)
        self._held = {}

    def finish(self) -> None:
        self._show()
        super().finish()


@contextmanager
def streamed_trace(request: Request, progress: Progress, child: Child) -> Iterator[StreamingTrace]:
    """The trace of a prompt, whose taps' names are known, as soon as llama.cpp begins. Raises UserError."""
    assert request.output is not None
    check_target(Path(request.output))
    begun, ended = Future[StreamingTrace](), Future[Info]()

    def run() -> None:
        try:
            ended.set_result(
                read_run(request, progress, child, partial(_ComingReader, begun=begun, ended=ended)).info()
            )
        except BaseException as error:  # whoever waits for the run is told
            ended.set_exception(error)
            if not begun.done():
                begun.set_exception(error)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(run)
        try:
            yield begun.result()
        except BaseException:
            child.stop()  # or else it would be waited for
            raise
