"""What other engines dump: .pt, .safetensors, .npy, a tensor, a step or a rank a file, named by rank and step."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.candidates import dump
from llamadiff.candidates.arrays import KINDS, RAW, npz
from llamadiff.candidates.pieces import Unread, named_row
from llamadiff.candidates.source import CandidateSource
from llamadiff.ext.dumps.joining import load_trace
from llamadiff.ext.dumps.labels import Label, Step, names_for, read_label
from llamadiff.ext.dumps.steps import Parts, request_of, rows_of
from llamadiff.ext.dumps.torch_file import ENDINGS, tensors_of
from llamadiff.system.errors import UserError
from llamadiff.trace.metadata import MAX_ID, Info
from llamadiff.trace.reader import Trace

Array = NDArray[Any]
Reader = Callable[[Path], list[Unread]]

SAFETENSORS, NPZ = ".safetensors", ".npz"
IDS = ("input_ids", "token_ids", "tokens", "ids")  # what a tensor of token ids is called
POSITIONS = ("positions", "position_ids")
SOLE = ("value", "tensor", "data", "output", "")  # what one tensor of a file is called, that is called as the file
LATE = ("model", "logits_processor", "lm_head")  # what SGLang's hook writes into the file of the pass that follows
MAX_TENSORS = 1 << 18
_OF_LIST = re.compile(r"([0-9]{1,9})\.(.+)")


def matches(spec: str) -> bool:
    """A .pt file, or a directory of such, of .safetensors, or of arrays whose names say a rank or a step."""
    path = Path(spec)
    if not path.is_dir():
        return path.suffix in ENDINGS and path.is_file()
    return any(_is_ours(file.relative_to(path)) for file in dump.files_in(path))


def _is_ours(path: Path) -> bool:
    if path.suffix in (*ENDINGS, SAFETENSORS):
        return True
    label = read_label(path.with_suffix("").as_posix())
    return path.suffix in (*RAW, ".npy", NPZ) and bool(label.step or label.rank is not None)


def files(spec: str) -> Iterator[Path]:
    """The files of tensors, and of token ids."""
    path = Path(spec)
    if not path.is_dir():
        yield path
        return
    yield from dump.token_files(path)
    yield from (file for file in dump.files_in(path) if file.suffix in READERS)


def open_source(spec: str) -> CandidateSource:
    """The headers of all tensors, by name, step and rank; values are read when they are wanted."""
    path = Path(spec)
    folder = path if path.is_dir() else path.parent
    for file in files(spec) if path.is_dir() else ():
        dump.check_inside(path, file)
    entries = [entry for file in files(spec) if file.suffix in READERS for entry in _entries(folder, file)]
    if len(entries) > MAX_TENSORS:
        raise UserError(f"{path}: holds more than {MAX_TENSORS} tensors; dump fewer layers or steps")
    parts = _by_place(path, entries)
    steps = request_of(*_ids_of(parts), rows_of(parts))
    stated = dump.read_tokens(path) if path.is_dir() else ()
    tokens = stated or steps.tokens
    run = None
    if tokens and sum(steps.rows) == len(tokens):
        batches = tuple(steps.rows)
        run = Info(tokens, tuple(range(len(tokens))), batches[0], None, {"name": "the dump"}, {}, batches)
    untold = f"{spec}: has no tensor of token ids (input_ids); a file {folder / 'tokens'} would hold them"
    has_ranks = any(entry.label.rank is not None for entry in entries)
    read = replace(steps, tokens=tokens, has_ranks=has_ranks)
    return CandidateSource(partial(load_trace, path, parts, read), tokens, untold, run=run)


# -- files ------------------------------------------------------------------------------------------------------------


def _of_safetensors(path: Path) -> list[Unread]:
    trace = Trace.open(path, bare=True)
    if trace.sketch is not None:
        raise UserError(f"{path}: is a sketch, which keeps no tensors; give it to llamadiff check, as a recording")
    ids = np.asarray(trace.info.tokens, np.int64)
    stated = [Unread(IDS[0], None, ids.shape, lambda _: (ids, None))] if ids.size else []
    return stated + [Unread(*named_row(name), trace.shape(name), partial(_reopened, path, name)) for name in trace]


def _reopened(path: Path, name: str, _most: int) -> tuple[Array, None]:
    """The values of a tensor; each map keeps a file descriptor, and a dump may have thousands of files."""
    return np.array(Trace.open(path, bare=True)[name]), None


def _of_array(path: Path) -> list[Unread]:
    name, row = named_row(path.stem)
    return [KINDS[path.suffix](path, "", row) if row is not None and name else KINDS[path.suffix](path, "", None)]


READERS: Mapping[str, Reader] = {
    **dict.fromkeys(ENDINGS, tensors_of), **dict.fromkeys(KINDS, _of_array), SAFETENSORS: _of_safetensors,
    NPZ: lambda path: npz(path)[0],
}  # fmt: skip


@dataclass(frozen=True)
class _Entry:
    label: Label
    tensor: Unread
    path: Path


def _entries(folder: Path, path: Path) -> Iterator[_Entry]:
    """The tensors of a file, each called as the file and the keys within it."""
    if path.parent == folder and path in dump.token_files(folder):
        return
    own = named_row(path.relative_to(folder).with_suffix("").as_posix())[0]
    tensors = _by_step(READERS[path.suffix](path))
    for tensor in tensors:
        name = own if len(tensors) == 1 and tensor.name in SOLE else f"{own}/{tensor.name}"
        label = read_label(name)
        if "pass" in label.words and label.step and any(each in LATE for each in names_for(label.name)):
            label = replace(label, step=(label.step[0] - 1, *label.step[1:]))
        yield _Entry(label, tensor, path)


def _by_step(tensors: list[Unread]) -> list[Unread]:
    """The tensors of a file; where it is a list of dicts with the same names, of which all but the first are of one
    token, these are steps."""
    places = [_OF_LIST.fullmatch(tensor.name) for tensor in tensors]
    names: dict[str, set[str]] = {}
    for place in places:
        if place is None:
            return tensors
        names.setdefault(place[1], set()).add(place[2])
    last = [tensor.shape or () for tensor, place in zip(tensors, places, strict=True) if place and place[1] != "0"]
    rows = sum(1 in shape[:2] for shape in last)
    if len(names) < 2 or len({frozenset(each) for each in names.values()}) > 1 or 2 * rows <= len(last):
        return tensors
    return [replace(tensor, name=f"step_{tensor.name}".replace(".", "/", 1)) for tensor in tensors]


# -- names, steps, ranks ----------------------------------------------------------------------------------------------


def _by_place(path: Path, entries: Sequence[_Entry]) -> Parts:
    """Name -> step -> rank -> tensor. Raises UserError for two of one place."""
    steps = {entry.label.step for entry in entries}
    by_step = len(steps) > 1
    places: dict[tuple[str, Step, int], list[_Entry]] = {}
    for entry in entries:
        label = entry.label
        at = f"@{entry.tensor.row}" if entry.tensor.row is not None else ""
        key = (f"{label.name}{at}", label.step if by_step else (), label.rank or 0)
        places.setdefault(key, []).append(entry)
    found: Parts = {}
    for (name, step, rank), some in places.items():
        orders = {entry.label.order: entry for entry in reversed(some)}
        if len(orders) < len(some) and _name_of(name) not in (*IDS, *POSITIONS):  # stages of a pipeline have the same
            raise UserError(
                f"{path}: {name or 'a tensor without a name'} is in {some[0].path.name} and {some[1].path.name}; "
                "say in the names of folders or files which rank and step they are of (rank1, step_2), or give one"
            )
        for number, order in enumerate(sorted(orders)):
            called = f"{name}.{number}" if len(orders) > 1 else name
            found.setdefault(called, {}).setdefault(step, {})[rank] = orders[order].tensor
    return found


def _name_of(name: str) -> str:
    """The last word of a name."""
    return name.replace("/", ".").rpartition(".")[2]


def _ids_of(parts: Parts) -> tuple[Mapping[Step, Array], Mapping[Step, Array]]:
    """The token ids of each step, and their positions, where they were dumped; they are parts no more."""
    found: list[dict[Step, Array]] = []
    for words in (IDS, POSITIONS):
        names = [name for name in parts if _name_of(name) in words]
        values: dict[Step, Array] = {}
        for name in names:
            for step, by_rank in parts.pop(name).items():
                tensor = next(iter(by_rank.values()))
                ids = tensor.read(MAX_TENSORS)[0].reshape(-1) if tensor.shape is not None else np.zeros(0)
                if ids.dtype.kind in "iu" and ids.size and ids.min() >= 0 and ids.max() < MAX_ID:
                    values.setdefault(step, ids)
        found.append(values)
    return found[0], found[1]
