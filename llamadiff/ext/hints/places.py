"""Where a file belongs that was given where a model or a trace does; and one whose name is nearly that of another."""

from __future__ import annotations

from difflib import get_close_matches
from itertools import islice
from pathlib import Path

from llamadiff.ext.hints import file_kinds as kinds

ALIKE = 0.75  # of two names, from which on one may be the other misspelt
CONVERT = "llama.cpp's convert_hf_to_gguf.py {folder} makes it one"
SAVE = (
    "save the tensors instead: safetensors.torch.save_file({{name: x.contiguous() for name, x in taps.items()}}, "
    '"mine.safetensors"), or let llamadiff.torch.record(model, ids, "mine.safetensors") do all of it'
)
RUN = "not what one computed; --candidate transformers:{folder} runs it"
_TAKES = "which compare takes and this does not: llamadiff compare MODEL --tokens 1,2,3 --candidate {path}"
_FIRST = "no GGUF file; the model comes first: llamadiff compare MODEL {path}"
# What a file is -> what is said of it where a model belongs, and where a trace does.
_SAID = {
    kinds.MODEL: {"trace": "no trace; give it as --model {path}, or first: llamadiff compare {path} TRACE"},
    kinds.ARRAY: {
        "model": "no GGUF file; the model comes first, and arrays after it: --candidate DIR",
        "trace": "which does not say its tap and tokens; put it into a directory as TAP.npy: --candidate DIR",
    },
    kinds.ARCHIVE: {"model": _FIRST, "trace": _TAKES},
    kinds.PICKLE: {
        "model": f"no GGUF file; of its checkpoint, {CONVERT}",
        "trace": f"which can run code and is not opened; {SAVE}",
    },
    kinds.TRACE: {"model": _FIRST},
    kinds.TENSORS: {"model": _FIRST},
    kinds.WEIGHTS: {
        "model": f"no GGUF file; {CONVERT}; llamadiff weights MODEL {{folder}} compares them with one",
        "trace": RUN,
    },
    kinds.CHECKPOINT: {
        "model": f"no GGUF file; {CONVERT}; llamadiff weights MODEL {{folder}} compares it with one",
        "trace": RUN,
    },
    kinds.ARRAYS: {"model": "no GGUF file; the model comes first", "trace": _TAKES},
    kinds.TRACES: {"model": "no GGUF file; the model comes first", "trace": "of which one is to be given here"},
}


def mistaken_file(path: Path, place: str) -> str | None:
    """What a file is that was refused, and where it belongs; None where that cannot be seen."""
    if not exists(path):
        near = near_name(path)
        return f"{path}: no such file; {near} is there" if near else None
    short = kinds.cut_off(path) if place == "trace" and path.is_file() else ""
    if short:
        return f"{path}: is cut off, {short}; write it again"
    if place == "model" and path.is_dir() and any(path.glob("*.gguf")):
        return None
    kind = kinds.kind_of(path)
    said = _SAID.get(kind, {}).get(place)
    folder = path if path.is_dir() else path.parent
    return f"{path}: is {kind}, {said.format(path=path, folder=folder)}" if said else None


def exists(path: Path) -> bool:
    """Whether something has this name: not where it is too long for one."""
    try:
        return path.exists()
    except OSError:
        return False


def near_name(path: Path) -> str:
    """The file beside a path whose name is nearest to its own; empty if none is near."""
    try:
        every = islice(path.parent.iterdir(), kinds.MOST)
        beside = {each.stem: each for each in every if each.suffix == path.suffix}
    except (OSError, ValueError):
        return ""
    return next((str(beside[stem]) for stem in get_close_matches(path.stem, beside, 1, ALIKE)), "")
