"""What a program wrote between its stops, in a folder: words with their addresses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from llamadiff.ext.record.changes import Span
from llamadiff.ext.record.memory import Words

MATRICES = 1 << 63  # the address from which on there is what is more likely weights than values
SPANS = np.dtype([("address", "<u8"), ("stop", "<u4"), ("words", "<u4")])
NO_CODE = 1 << 16  # in place of a return code: the program ended without a word


class LogWriter:
    """Writes a log; ``bytes`` is how much of it there is."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.bytes, self.stops = folder, 0, 0
        self._files: dict[str, IO[bytes]] = {name: (folder / name).open("wb") for name in ("spans", "words")}

    def add_stop(self, spans: Sequence[Span]) -> None:
        """A stop, and what was written before it."""
        heads = np.array([(span.address, self.stops, len(span.words)) for span in spans], SPANS)
        self._files["spans"].write(heads.tobytes())
        for span in spans:
            self._files["words"].write(span.words.tobytes())
            self.bytes += span.words.nbytes
        self.stops += 1

    def close(self, code: int = 0, error: str = "") -> None:
        """``code``: the program's return code; ``error``: why it could not be recorded."""
        for file in self._files.values():
            file.close()
        about = {"stops": self.stops, "code": code, "error": error}
        (self._folder / "about").write_text(json.dumps(about), "utf-8")


class Log:
    """A log that was written: ``spans``, whose words follow each other in ``words``; ``starts`` says where each begins.

    ``stops``: how many there were; ``code`` and ``error`` as the writer was told.
    """

    def __init__(self, folder: Path) -> None:
        self.spans: NDArray[np.void] = np.fromfile(folder / "spans", SPANS)
        self.words: Words = np.fromfile(folder / "words", np.uint32)
        about = json.loads((folder / "about").read_text("utf-8"))
        self.stops, self.code, self.error = int(about["stops"]), int(about["code"]), str(about["error"])
        self.starts = np.concatenate([[0], np.cumsum(self.spans["words"], dtype=np.int64)])

    def without_matrices(self) -> Log:
        """Without what its addresses say to be weights rather than values of a few tokens; this log if nothing is."""
        is_kept = self.spans["address"] < MATRICES
        if is_kept.all():
            return self
        log = copy(self)
        log.spans, log.words = self.spans[is_kept], self.words[np.repeat(is_kept, self.spans["words"])]
        log.starts = np.concatenate([[0], np.cumsum(log.spans["words"], dtype=np.int64)])
        return log
