"""A run to carry: all that llama.cpp's process told of every node, in a file, to be judged on another machine.

The file is what was told, answer after answer: a line of JSON each, with as many bytes behind it as its ``sizes`` say.
The first line says what was asked, the last one has the SHA-256 of all before it. Weights are not in it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from llamadiff.ext.graph.readers import NodeReader
from llamadiff.llamacpp.capture import read_run
from llamadiff.llamacpp.dequantize import Dequantizer
from llamadiff.llamacpp.readers import RunReader, Tell
from llamadiff.llamacpp.request import Request, Settings
from llamadiff.system.errors import UserError
from llamadiff.system.input import check_regular
from llamadiff.system.output import check_target, unwritten
from llamadiff.system.progress import Progress
from llamadiff.system.stale_files import temporary_file
from llamadiff.trace.stated import parse_json, reason

SCHEMA = "llamadiff.nodes/1"
ENDING = ".nodes"
MEANT = f"what capture --nodes wrote (a {ENDING} file)"
MAX_LINE, MAX_BLOB = 1 << 24, 1 << 36  # bytes
MAX_NODES = 1 << 22
LAST = 400  # bytes that the last two lines have at most
_ASKED = ("text", "n_predict", "n_prefill", "batches", "first", "patterns", "layers", "tokens")


class NodeRecording(RunReader):
    """Writes down what is told."""

    nodes = 0

    def __init__(self, request: Request, tell: Tell) -> None:
        super().__init__(request, tell)
        assert request.output is not None
        self.path = Path(request.output)
        check_target(self.path)
        self._digest = hashlib.sha256()
        self._temporary = self.open.enter_context(temporary_file(self.path))
        self._file: IO[bytes] = self.open.enter_context(self._temporary.open("wb"))
        said = request.to_json()
        asked = {name: said[name] for name in _ASKED}
        self._put({"schema": SCHEMA, "asked": asked, "settings": request.settings.to_json(),
                   "model": dict(request.model_info)})  # fmt: skip

    def read_answer(self, answer: Mapping[str, Any], data: Sequence[Any]) -> None:
        super().read_answer(answer, data)
        if "phase" not in answer:
            told = {key: value for key, value in answer.items() if key != "at"}
            self._put({**told, "sizes": [len(part) for part in data]}, data)
            self.nodes += "node" in answer

    def _node(self, answer: Mapping[str, Any], data: Sequence[Any]) -> None:
        """It is kept as it is."""

    def _computed(self, answer: Mapping[str, Any], data: Sequence[Any]) -> None:
        """It is kept as it is."""

    def _put(self, line: Mapping[str, Any], data: Sequence[Any] = ()) -> None:
        try:
            for part in (json.dumps(line).encode() + b"\n", *data):
                self._file.write(part)
                self._digest.update(part)
        except OSError as error:
            raise unwritten(self.path, error) from None

    def finish(self) -> None:
        self._put({"model_sha256": self.sha256.result()})
        try:
            self._file.write(json.dumps({"sha256": self._digest.hexdigest()}).encode() + b"\n")
            self._file.close()  # Windows renames no file that is open
            self._temporary.replace(self.path)
        except OSError as error:
            raise unwritten(self.path, error) from None


def recorded_request(path: Path, model: str) -> Request:
    """What was asked of a recorded run, of a model. Raises UserError for a file that is none."""
    with _opened(path) as file:
        first = _line(path, file)
    try:
        if first.get("schema") != SCHEMA:
            raise ValueError(f"its schema is {first.get('schema')!r}")
        settings = {**first["settings"], "llama_cpp": "", "runner": ""}
        asked = {**Request(model).to_json(), **{name: first["asked"][name] for name in _ASKED}}
        request = Request.from_json({**asked, "settings": vars(Settings(**settings)), "nodes": True})
        return replace(request, model=model, model_info=dict(first["model"]))
    except Exception as error:  # a stranger's file may say anything
        raise _damaged(path, error) from None


def read_again(path: Path, request: Request, opened: Dequantizer | None = None) -> NodeReader:
    """A recorded run, every node checked; ``opened``: the model, if it is open.

    Raises UserError for a file that is cut off, altered, or of another model.
    """
    reader, named = NodeReader(request, _unheard, opened), _model_of(path)
    if named != reader.sha256.result():
        raise UserError(
            f"{path}: was recorded with another model (sha256 {named[:12]}) than {request.model} (sha256 "
            f"{reader.sha256.result()[:12]}); give the file that it is of"
        )
    with _opened(path) as file, reader:
        _line(path, file)
        try:
            for answer, data in _answers(path, file):
                reader.read_answer(answer, data)
            reader.finish()
            reader.info()
        except UserError:
            raise
        except Exception as error:  # the same
            raise _damaged(path, error) from None
    return reader


def _unheard(**_: Any) -> None:
    """Nobody is there to be told anything."""


def _answers(path: Path, file: IO[bytes]) -> Iterator[tuple[dict[str, Any], list[memoryview]]]:
    """Each answer with its bytes, up to the last two lines."""
    for _ in range(MAX_NODES * 3):
        answer = _line(path, file)
        if "model_sha256" in answer:
            return
        sizes = answer.pop("sizes", [])
        if not all(isinstance(size, int) and 0 <= size <= MAX_BLOB for size in sizes):
            raise ValueError("sizes that no tensor has")
        data = [memoryview(file.read(size)) for size in sizes]
        if [len(part) for part in data] != sizes:
            raise ValueError("it ends too early")
        _check_described(answer, data)
        yield answer, data
    raise ValueError("more nodes than any graph has")


def _check_described(answer: Mapping[str, Any], data: Sequence[memoryview]) -> None:
    """Raise ValueError for a tensor that is larger than what was sent of it."""
    held = dict(zip(answer.get("read", ()), data, strict=True)) if "node" in answer else {}
    for said in [*answer.get("tensors", ()), *([answer["node"]] if "node" in answer else [])]:
        sizes, steps = said["ne"], said["nb"]
        whole = all(isinstance(n, int) and 0 <= n <= MAX_BLOB for n in (*sizes, *steps))
        if len(sizes) != 4 or len(steps) != 4 or not whole:
            raise ValueError("sizes or strides that no tensor has")
        part = held.get(said["at"])
        if part is not None and math.prod(sizes) > 4 * max(1, len(part)):
            raise ValueError(f"{math.prod(sizes)} values in {len(part)} bytes")


def _model_of(path: Path) -> str:
    """The SHA-256 of the model that a run is of. Raises UserError for a file that is cut off, or altered."""
    with _opened(path) as file:
        digest, last = hashlib.sha256(), b""
        while part := file.read(1 << 22):
            last += part
            digest.update(last[:-LAST])
            last = last[-LAST:]
    before, _, line = last.rstrip(b"\n").rpartition(b"\n")
    digest.update(before + b"\n")
    try:
        said, model = parse_json(line)["sha256"], parse_json(before.rpartition(b"\n")[2])["model_sha256"]
    except (ValueError, TypeError, KeyError):
        raise UserError(f"{path}: is cut off: it has no end; copy or record it again") from None
    if said != digest.hexdigest():
        raise UserError(f"{path}: was altered: its SHA-256 is another than it says; copy or record it again")
    return str(model)


def _line(path: Path, file: IO[bytes]) -> dict[str, Any]:
    line = file.readline(MAX_LINE)
    try:
        said = parse_json(line)
        if not isinstance(said, dict):
            raise ValueError("no object")
    except ValueError as error:
        raise _damaged(path, error) from None
    return said


def _opened(path: Path) -> IO[bytes]:
    check_regular(path, MEANT)
    try:
        return path.open("rb")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give {MEANT}") from None


def _damaged(path: Path, error: BaseException) -> UserError:
    return UserError(f"{path}: not a recorded run ({reason(error)}); give {MEANT}")


def record(request: Request, progress: Progress) -> int:
    """Run a request, and write its ``output`` -> how many nodes there are. Raises UserError."""
    recording = read_run(request, progress, kind=NodeRecording)
    assert isinstance(recording, NodeRecording)
    return recording.nodes
