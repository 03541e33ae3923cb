"""Files that are no dump (pickles, checkpoints, another library's names), and what to do with each."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from llamadiff.candidates.map_file import BUILT_IN
from llamadiff.system.errors import UserError

PICKLES = (".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_MAYBE = (".bin",)  # a pickle, or raw values
_ZIP = b"PK\x03\x04"  # how torch.save's files begin
_PROTOCOLS = tuple(b"\x80" + bytes([version]) for version in range(2, 6))  # and pickles of their own
_SAVE = (
    "save the tensors instead: safetensors.torch.save_file({name: x.contiguous() for name, x in taps.items()}, "
    '"mine.safetensors"), or let llamadiff.torch.record(model, ids, "mine.safetensors") do all of it'
)
_LIBRARIES = {"hf": "Hugging Face's modules", "transformer-lens": "TransformerLens' hooks"}
MOST = 10_000  # files of a directory that are looked at


def refuse_foreign(spec: str) -> None:
    """Raise UserError for a pickle, which is never opened, and for a checkpoint, which has to be run first."""
    path = Path(spec)
    if path.is_file() and _is_pickle(path):
        raise UserError(f"{path}: is a pickle, which can run code and is not opened; {_SAVE}")
    if not path.is_dir():
        return
    if is_checkpoint(path):
        raise UserError(
            f"{path}: is a model of Hugging Face, not what one computed; --candidate transformers:{path} runs it"
        )
    files = [file for file in islice(path.iterdir(), MOST) if file.is_file()]
    pickles = sorted(file for file in files if _is_pickle(file))
    if pickles and len(pickles) == len(files):
        raise UserError(f"{path}: {pickles[0].name} is a pickle, which can run code and is not opened; {_SAVE}")


def is_checkpoint(folder: Path) -> bool:
    """Whether a directory holds a model as Hugging Face keeps it."""
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def _is_pickle(path: Path) -> bool:
    if path.suffix in PICKLES:
        return True
    if path.suffix not in _MAYBE:
        return False
    with path.open("rb") as file:
        start = file.read(4)
    return start == _ZIP or start[:2] in _PROTOCOLS


def advice_on_names(names: Iterable[str]) -> str | None:
    """What to do about names that no tap has, but that another library uses; None if none is known to."""
    known = list(islice(names, MOST))
    if any(name.startswith("model.") and name.endswith(".weight") for name in known):
        return "these are a model's weights, not what it computed; --candidate transformers:DIR runs a checkpoint"
    found = {library: len([name for name in known if _pattern(library).fullmatch(name)]) for library in _LIBRARIES}
    best = max(found, key=lambda library: found[library])
    return f"these are the names of {_LIBRARIES[best]}: add --map {best}" if found[best] else None


def _pattern(library: str) -> re.Pattern[str]:
    names = (re.escape(entry.name).replace(re.escape("{i}"), "[0-9]{1,4}") for entry in BUILT_IN[library].values())
    return re.compile("|".join(names))
