"""A checkpoint's processor, which runs in a process of its own: as it is, and with one step changed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.ext.preprocess.wav import is_wav
from llamadiff.system import python_child
from llamadiff.system.errors import UserError
from llamadiff.system.stale_files import temporary_directory
from llamadiff.system.started import Process, kill, start

Array = NDArray[Any]
CONFIGS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
NEEDS = "preprocess needs torch, transformers and Pillow: pip install torch transformers pillow"
MOST = 1 << 28  # values of a run


@dataclass(frozen=True)
class Features:
    """What a processor gives: an array, and what it says beside it."""

    values: Array
    more: Mapping[str, Any]


class Processor:
    """A processor and what it is given; ``run`` raises LookupError for a step that it does not have."""

    def __init__(self, process: Process, folder: Path, checkpoint: Path, kind: str) -> None:
        self._process, self._folder, self.kind = process, folder, kind
        self.about = self._answer()
        if "error" in self.about:
            raise UserError(f"{checkpoint}: transformers cannot load its processor ({self.about['error']})")
        self.config: Mapping[str, Any] = self.about["config"]

    def run(self, request: Mapping[str, Any]) -> Features:
        """What it gives with something changed."""
        to = self._folder / "features.npy"
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({**request, "to": str(to)}) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise UserError(f"the processor's process {python_child.how_it_ended(self._process.wait())}") from None
        more = self._answer()
        if "error" in more:
            raise LookupError(more["error"])
        values = np.load(to, allow_pickle=False)
        if values.size > MOST:
            raise LookupError(f"{values.size} values")
        return Features(values, more)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise UserError(f"the processor's process {python_child.how_it_ended(self._process.wait())}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def processor_of(checkpoint: Path, file: Path) -> Iterator[Processor]:
    """The processor of a checkpoint's folder, ready for a picture or a sound. Raises UserError."""
    if any(find_spec(name) is None for name in ("torch", "transformers", "PIL")):
        raise UserError(NEEDS)
    if not checkpoint.is_dir():
        raise UserError(f"{checkpoint}: is no directory of a checkpoint; its {CONFIGS[0]} is enough")
    if not any((checkpoint / name).is_file() for name in CONFIGS):
        raise UserError(f"{checkpoint}: has no {CONFIGS[0]} or {CONFIGS[1]}; hf download MODEL --include '*.json'")
    if not file.is_file():
        raise UserError(f"{file}: no such file; give the picture or the .wav file that the engine was given")
    kind = "sound" if is_wav(file) else "picture"
    with temporary_directory() as folder:
        process = start(
            python_child.command("llamadiff.ext.preprocess.child", str(checkpoint), str(file), kind), kill,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, encoding="utf-8",
        )  # fmt: skip
        try:
            yield Processor(process, folder, checkpoint, kind)
        finally:
            kill(process)
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
