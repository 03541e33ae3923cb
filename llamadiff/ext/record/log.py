"""What a program wrote between its stops, in a folder: words with their addresses, and where it stood."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from llamadiff.ext.record.changes import Span
from llamadiff.ext.record.memory import Words

SPANS, STOPS = np.dtype([("address", "<u8"), ("stop", "<u4"), ("words", "<u4")]), np.dtype("<u4")


class LogWriter:
    """Writes a log; ``bytes`` is how much of it there is."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.bytes, self.stops = folder, 0, 0
        self._files: dict[str, IO[bytes]] = {name: (folder / name).open("wb") for name in ("spans", "words", "stops")}

    def add_stop(self, function: int, leaves: int, spans: Sequence[Span]) -> None:
        """A stop at the call or return of a function, and what was written before it."""
        self._files["stops"].write(np.array([function, leaves], STOPS).tobytes())
        heads = np.array([(span.address, self.stops, len(span.words)) for span in spans], SPANS)
        self._files["spans"].write(heads.tobytes())
        for span in spans:
            self._files["words"].write(span.words.tobytes())
            self.bytes += span.words.nbytes
        self.stops += 1

    def close(self, functions: Sequence[str], ended: dict[str, object]) -> None:
        """``functions``: their names, by number; ``ended``: how the program did, and what was not recorded."""
        for file in self._files.values():
            file.close()
        (self._folder / "about").write_text(json.dumps({"functions": [*functions], **ended}), "utf-8")


class Log:
    """A log that was written: ``spans``, whose words follow each other in ``words``; ``starts`` says where each begins.

    ``stops`` [stop, 2]: the number of a function, and 1 where it returned.
    """

    def __init__(self, folder: Path) -> None:
        self.spans: NDArray[np.void] = np.fromfile(folder / "spans", SPANS)
        self.words: Words = np.fromfile(folder / "words", np.uint32)
        self.stops = np.fromfile(folder / "stops", STOPS).reshape(-1, 2)
        self.about = json.loads((folder / "about").read_text("utf-8"))
        self.starts = np.concatenate([[0], np.cumsum(self.spans["words"], dtype=np.int64)])

    def where(self, stop: int) -> str:
        """The place of a stop, in words."""
        function, leaves = self.stops[stop]
        return f"{'return from' if leaves else 'call of'} {self.about['functions'][function]}"
