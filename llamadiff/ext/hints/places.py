"""What a file is that was given where another belongs, and what takes it; one whose name is nearly that of another."""

from __future__ import annotations

from difflib import get_close_matches
from itertools import islice
from pathlib import Path

from llamadiff import plugins
from llamadiff.ext.hints import file_kinds as kinds

ALIKE = 0.75  # of two names, from which on one may be the other misspelt
CONVERT = "llama.cpp's convert_hf_to_gguf.py {folder} makes it one"
SAVE = (
    "save the tensors instead: safetensors.torch.save_file({{name: x.contiguous() for name, x in taps.items()}}, "
    '"mine.safetensors"), or let llamadiff.torch.record(model, ids, "mine.safetensors") do all of it'
)
RUN = "not what one computed; --candidate transformers:{folder} runs it"
WILD = "*?["  # in words that a shell expands
MODEL, TRACE, NODES, OP, CHECKPOINT = "model", "trace", "recorded run", "saved op", "checkpoint"
WEIGHTS, TOML, TEXT, ENGINE = "weights", "TOML", "text", "engine"
# A place -> what it takes, in words behind "no", and the kinds that may be that.
_TAKES = {
    MODEL: ("GGUF file", {kinds.MODEL, kinds.MODELS}),
    TRACE: ("trace", {kinds.TRACE, kinds.TENSORS}),
    NODES: ("run that capture --nodes recorded", {kinds.NODES}),
    OP: ("op that backend --keep saved", {kinds.OP}),
    CHECKPOINT: ("checkpoint's directory", {kinds.CHECKPOINT, kinds.FOLDER}),
    WEIGHTS: (
        "model's weights",
        {kinds.MODEL, kinds.MODELS, kinds.CHECKPOINT, kinds.WEIGHTS, kinds.TENSORS, kinds.ARRAYS, kinds.FOLDER},
    ),
    TOML: ("TOML file", {kinds.TEXT, kinds.SHORT, kinds.EMPTY}),
    TEXT: ("text", {kinds.TEXT, kinds.SHORT, kinds.EMPTY, kinds.REPORT, kinds.PROGRAM}),
    ENGINE: (
        "engine's command, and none of its files",
        {kinds.MODEL, kinds.CHECKPOINT, kinds.TEXT, kinds.SHORT, kinds.PROGRAM},
    ),
}
_COMPARED = "llamadiff compare MODEL --tokens 1,2,3 --candidate {path} judges it"
# A kind -> what takes it.
_BELONGS = {
    kinds.MODEL: "llamadiff compare {path} TRACE judges a trace by it",
    kinds.MODELS: "give one of them",
    kinds.TRACE: "llamadiff compare MODEL {path} judges it",
    kinds.TENSORS: _COMPARED,
    kinds.ARCHIVE: _COMPARED,
    kinds.SAVED: _COMPARED,
    kinds.ARRAYS: _COMPARED,
    kinds.ARRAY: "arrays are given as a directory of TAP.npy: --candidate DIR",
    kinds.TRACES: "llamadiff check {path} judges them",
    kinds.NODES: "llamadiff backend MODEL --recorded {path} judges it",
    kinds.OP: "llamadiff replay {path} runs it again",
    kinds.REPORT: "give what it is a report of",
    kinds.EMPTY: "it was not written to its end",
    kinds.PROGRAM: '--candidate "cmd: {run} {{tokens}} {{out}}" runs one',
    kinds.CHECKPOINT: "--candidate transformers:{folder} runs it",
    kinds.WEIGHTS: "--candidate transformers:{folder} runs the checkpoint",
}
# What is said instead, of a kind in a place.
_SAID = {
    (kinds.MODEL, TRACE): "no trace; give it as --model {path}, or first: llamadiff compare {path} TRACE",
    (kinds.ARRAY, TRACE): "which does not say its tap and tokens; put it into a directory as TAP.npy: --candidate DIR",
    (kinds.PICKLE, MODEL): f"no GGUF file; of its checkpoint, {CONVERT}",
    (kinds.PICKLE, TRACE): f"which can run code and is not opened; {SAVE}",
    (kinds.WEIGHTS, MODEL): f"no GGUF file; {CONVERT}; llamadiff weights MODEL {{folder}} compares them with one",
    (kinds.CHECKPOINT, MODEL): f"no GGUF file; {CONVERT}; llamadiff weights MODEL {{folder}} compares it with one",
    (kinds.WEIGHTS, TRACE): RUN,
    (kinds.CHECKPOINT, TRACE): RUN,
    (kinds.TRACES, TRACE): "of which one is to be given here",
    (kinds.TRACES, OP): "of which none is taken; for saved ops give them: llamadiff replay {path}/*.safetensors",
    (kinds.WEIGHTS, CHECKPOINT): "no directory of a checkpoint; give {folder}",
}


def mistaken_file(path: Path, place: str) -> str | None:
    """What a file is that was refused, and where it belongs; None where that cannot be seen."""
    if not exists(path):
        near = near_name(path)
        if not near and any(sign in path.name for sign in WILD):
            return f"{path}: no such file; a shell expands {path.name} where it stands without quotes and files match"
        return f"{path}: no such file; {near} is there" if near else None
    short = kinds.cut_off(path) if place == TRACE and path.is_file() else ""
    if short:
        return f"{path}: is cut off, {short}; write it again"
    kind, (wanted, taken) = kinds.kind_of(path), _TAKES[place]
    kind = kinds.SAVED if kind == kinds.PICKLE and place == TRACE and is_read(path) else kind
    if not kind or kind in taken or (place == MODEL and path.is_dir() and any(path.glob("*.gguf"))):
        return None
    belongs = f"; {_BELONGS[kind]}" if kind in _BELONGS else ""
    said = _SAID.get((kind, place), f"no {wanted}{belongs}")
    run = f"python {path}" if path.suffix == ".py" else path
    return f"{path}: is {kind}, {said.format(path=path, folder=path if path.is_dir() else path.parent, run=run)}"


def is_read(path: Path) -> bool:
    """Whether a file is an archive of torch.save's, and the slice is there that reads its pickle as data."""
    return "dumps" in plugins.slices() and kinds.is_saved(path)


def exists(path: Path) -> bool:
    """Whether something has this name: not where it is too long for one."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def near_name(path: Path) -> str:
    """The file beside a path whose name is nearest to its own; empty if none is near."""
    try:
        every = islice(path.parent.iterdir(), kinds.MOST)
        beside = {each.stem: each for each in every if each.suffix == path.suffix}
    except (OSError, ValueError):
        return ""
    return next((str(beside[stem]) for stem in get_close_matches(path.stem, beside, 1, ALIKE)), "")
