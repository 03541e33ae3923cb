"""What is wrong with a ``--candidate``: a command's words, a file that is none, a name that is nearly another."""

from __future__ import annotations

import os
import re
import shlex
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

from llamadiff import plugins
from llamadiff.candidates import TRACES
from llamadiff.candidates.command import PREFIX
from llamadiff.ext.hints import file_kinds as kinds
from llamadiff.ext.hints.places import RUN, SAVE, TRACE, exists, is_read, mistaken_file, near_name

# What braces stand for in a command.
KNOWN = ("model", "tokens", "tokens_file", "rows", "prompt", "n_prefill", "n_predict", "out", "steps")
ENDINGS = (*TRACES, ".gguf", ".st", ".log")  # of what may be a candidate
ALIKE = 0.85  # of a prompt and a trace's name, from which on it may be that, misspelt
_MEANT = {"ids": "tokens", "token_ids": "tokens", "dump": "out", "trace": "out", "gguf": "model"}
_WAYS = (PREFIX, "transformers:", "llama.cpp:", "http:", "https:")
_OPERATORS = {"&&", "||", "|", ";", "&", ">", ">>", "<", "2>", "2>&1", "&>"}
_BRACES = re.compile(r"(?<!\$)\{([A-Za-z_]{2,20})\}")
_ADDRESS = re.compile(r"[\w.-]{1,99}:\d{2,5}(?:/\S*)?", re.ASCII)


def mistaken_candidate(spec: str) -> str | None:
    """What is wrong with it, in one line; None where nothing is that can be seen."""
    if not spec:
        return "--candidate is empty (is a variable unset?); give one, or leave it out"
    if spec.startswith(PREFIX):
        fault = _fault_of_command(spec.removeprefix(PREFIX))
        return f"--candidate {spec}: {fault}" if fault else None
    path = Path(spec)
    return _mistaken_path(path) if exists(path) else _meant_by(spec, path)


def _meant_by(spec: str, path: Path) -> str | None:
    """What a word that is no file's name may have been meant for."""
    if set(_BRACES.findall(spec)) & {*KNOWN} and ":" not in spec.partition(" ")[0]:
        return f'--candidate {spec}: is no file; for a command put cmd: before it: --candidate "cmd: {spec}"'
    if _ADDRESS.fullmatch(spec):
        return f"--candidate {spec}: is no file; for a server give --candidate http://{spec}"
    way = next(iter(get_close_matches(f"{spec.partition(':')[0]}:", _WAYS, 1, 0.8)), "") if ":" in spec else ""
    if way and not spec.startswith(way):
        return f"--candidate {spec}: is no file; did you mean {way}{spec.partition(':')[2]}?"
    near = near_name(path) if ":" not in spec else ""
    return f"--candidate {spec}: no such file; {near} is there" if near else None


def mistaken_prompt(prompt: str) -> str | None:
    """A prompt that is a trace's name, or nearly, or the beginning of one, or like a server without its http://."""
    path = Path(prompt)
    whole = next((file for ending in ENDINGS if exists(file := Path(f"{prompt}{ending}"))), None)
    if whole is not None and path.name:
        return f"{prompt}: {whole} is here; did you mean it?"
    if len(prompt.split()) != 1 or (not _ADDRESS.fullmatch(prompt) and "." not in path.name):
        return None
    try:
        traces = [each.name for each in islice(path.parent.iterdir(), kinds.MOST) if each.suffix in TRACES]
    except (OSError, ValueError):  # what cannot be listed says nothing
        traces = []
    near = next(iter(get_close_matches(path.name, traces, 1, ALIKE)), None)
    if near is not None:
        return f"{prompt}: no such trace; {near} is there"
    server = f"{prompt}: looks like a server; give --candidate http://{prompt} and a prompt"
    return server if _ADDRESS.fullmatch(prompt) else None


def _fault_of_command(line: str) -> str | None:
    """Words for a shell, which runs none of it, and braces that stand for nothing."""
    try:
        words = shlex.split(line, posix=False)  # quotes stay, and what is in them is the command's own
    except ValueError:
        return None
    operator = next((word for word in words if word in _OPERATORS), None)
    operator = operator or next((";" for word in words if word.endswith(";") and word[0] not in "'\""), None)
    if operator:
        script = line.strip() if "'" not in line else "..."
        return f"no shell runs it, and {operator} would go to the command as a word; give cmd: sh -c '{script}'"
    program = Path(words[0]) if words else Path()
    if program.is_file() and not os.access(program, os.X_OK) and program.name != words[0]:
        start = "python " if program.suffix == ".py" else "sh " if program.suffix == ".sh" else ""
        return f"{program} is not executable; give cmd: {start}{program} ..." if start else None
    for name in _BRACES.findall(" ".join(word for word in words if " " not in word)):
        meant = _MEANT.get(name) or next(iter(get_close_matches(name, KNOWN, 1, 0.6)), None)
        if name not in KNOWN and meant is not None:
            listed = ", ".join(f"{{{known}}}" for known in KNOWN)
            return f"{{{name}}} stands for nothing; did you mean {{{meant}}}? known are {listed}"
    return None if "{out}" in line or not words else "has no {out}, the file that it has to write: --dump {out}"


def _mistaken_path(path: Path) -> str | None:
    """A pickle, which is never opened; what has to be run first; an array without its tap; what is no run's values."""
    kind = kinds.kind_of(path)
    if kind == kinds.CHECKPOINT:
        return f"{path}: is a model of Hugging Face, {RUN.format(folder=path)}"
    if kind == kinds.PICKLE and is_read(path):
        return None
    if path.suffix == TRACES[1] and kind in (kinds.TRACE, kinds.TENSORS):
        return f"{path}: is {kind}, no NumPy archive; call it {path.with_suffix(TRACES[0]).name}"
    if kind in (kinds.PICKLE, kinds.ARRAY, kinds.NODES, kinds.OP, kinds.REPORT, kinds.PROGRAM):
        return mistaken_file(path, TRACE)
    return _mistaken_folder(path, kind) if path.is_dir() else None


def _mistaken_folder(path: Path, kind: str) -> str | None:
    """Traces, of which one is the candidate where nothing puts them together, or pickles alone."""
    files = [file for file in islice(path.iterdir(), kinds.MOST) if file.is_file()]
    if (
        kind == kinds.TRACES
        and all(file.suffix in (TRACES[0], ".gguf") for file in files)
        and "dumps" not in plugins.slices()
    ):
        return mistaken_file(path, TRACE)
    pickles = sorted(file for file in files if kinds.is_pickle(file) and not is_read(file))
    if not pickles or len(pickles) < len(files):
        return None
    return f"{path}: {pickles[0].name} is a pickle, which can run code and is not opened; {SAVE.format()}"
